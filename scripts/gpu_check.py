"""Check kernels, training steps, resumption and sampling on this machine's accelerator, then measure speed.

`make gpu-check` takes at most 9 minutes on one GPU. It prints a table and writes it to
`benchmarks/gpu/results/DEVICE-DATE.md`; the exit status is 1 when a row is wrong. On a machine without an accelerator
it runs on the CPU with small sizes, prints the table and writes nothing. It needs torch, numpy, safetensors and rich
only, so it runs where Hydra and the data extras are not installed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.attention.packed_mask import PackedMask, find_boundaries
from kitforge.core.kernels.costs import cost
from kitforge.core.kernels.dispatch import (
    implementation,
    select,
)
from kitforge.core.nn.context import Context, causal_mask
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.foundation import device as devices
from kitforge.foundation.errors import DeviceError
from kitforge.foundation.log import console
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.kit import RunInputs
from kitforge.kits.registry import kit_of
from kitforge.models.llama.model import LlamaConfig
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.run_folder import train
from kitforge.verify.kernel_cases import TABLE_TOLERANCE, TOLERANCE, has_same_mask, kernel_errors, table_errors

Row = tuple[str, str, str]  # what, measured, verdict; a verdict in capitals is a failure
RESULTS = Path(__file__).parent.parent / "benchmarks" / "gpu" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of runs and measurements."""

    shape: dict[str, Any]  # of the LLaMA that is trained
    steps: int
    batch_size: int
    sequence_length: int
    rows: int  # of the memory-bound kernels
    width: int
    vocabulary: int
    num_new_tokens: int
    clicks: int  # batch size of Wide & Deep
    network: dict[str, int]  # of the LLaMA whose speed is measured


LLAMA: dict[str, Any] = {
    "family": "llama",
    "dim": 512,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 4,
    "mlp_dim": 1408,
}
GPU = Sizes(
    shape=LLAMA,
    steps=20,
    batch_size=16,
    sequence_length=512,
    rows=16384,
    width=4096,
    vocabulary=131072,
    num_new_tokens=128,
    clicks=16000,
    # LLaMA 3.2 1B.
    network={"dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 8192, "vocab_size": 128256},
)
CPU = replace(
    GPU,
    shape={**LLAMA, "dim": 64, "num_layers": 2, "mlp_dim": 128},
    batch_size=8,
    sequence_length=128,
    rows=256,
    width=512,
    vocabulary=1000,
    num_new_tokens=16,
    clicks=512,
    network={"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 128, "vocab_size": 512},
)


def check_kernels(device: torch.device) -> Iterator[Row]:
    """Outputs and gradients at O1 in each dtype against the float64 references."""
    for name, errors in kernel_errors(device, "O1"):
        words = ", ".join(f"{str(dtype).removeprefix('torch.')} {error:.0e}" for dtype, error in errors.items())
        is_right = all(error < TOLERANCE[dtype] for dtype, error in errors.items())
        yield f"kernel {name}", words, "equal" if is_right else "DIFFERENT"


def check_tables(device: torch.device) -> Iterator[Row]:
    """The loops over rows of tables on the device against the references on the CPU."""
    for name, error in table_errors(device):
        yield f"table {name}", f"{error:.0e}", "equal" if error < TABLE_TOLERANCE else "DIFFERENT"
    yield "dropout mask", "bits of CPU and device", "equal" if has_same_mask(device) else "DIFFERENT"


def text_run(place: Path, device: torch.device, sizes: Sizes, **more: Any) -> tuple[Any, Any]:
    """Options and assembly of a small LLaMA on Python's own sources."""
    kit = kit_of("text_generation")
    trainer = {
        "max_steps": sizes.steps,
        "progress": False,
        "eval_batches": 2,
        "log_every": 1,
        **more.pop("trainer", {}),
    }
    data = {"train": "python_stdlib", "cache": str(place / "cache"), "batch_size": sizes.batch_size}
    options = kit.read_options(
        {
            "model": sizes.shape,
            "device": str(device),
            "output_dir": str(place / more.pop("name")),
            "data": {**data, "sequence_length": sizes.sequence_length},
            "trainer": trainer,
            **more,
        }
    )
    inputs = RunInputs[Any](callbacks=CALLBACKS)
    return options, kit.assemble(options, inputs, Rendezvous.open(options.parallel, options.device))


CALLBACKS: list[Callback] = []


class KillAt(Callback):
    """Ends this process without any chance to clean up, after a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_event(self, event: Event, run: RunContext) -> None:
        """See `Callback`."""
        if event.kind == "step" and run.state.cursor.step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def losses(folder: Path) -> dict[int, float]:
    """The training loss of each step, the last one written where a step was run twice."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {each["step"]: each["loss"] for each in records if "loss" in each and "step" in each}


def check_training(device: torch.device, sizes: Sizes, precision: str, place: Path) -> Row:
    """Some steps: does the loss fall, and how fast do they go?"""
    options, assembly = text_run(place, device, sizes, name=precision, precision=precision)
    before = assembly.loop.evaluate()["eval/loss"]
    started = time.perf_counter()
    metrics = train(assembly.loop, options, assembly.folder, assembly.config_text)
    devices.synchronize(device)
    rate = sizes.steps * sizes.batch_size * sizes.sequence_length / (time.perf_counter() - started)
    words = f"loss {before:.2f} -> {metrics['eval/loss']:.2f}, {rate:,.0f} tokens/s with checks and saves"
    return f"train {precision}", words, "learns" if metrics["eval/loss"] < before - 0.3 else "DOES NOT LEARN"


def train_deterministically(place: Path, device: str, sizes: Sizes, name: str, kill_at: int | None) -> None:
    """A run of ten steps with checkpoints, killed after a step or whole; a killed one goes on when called again."""
    CALLBACKS[:] = [] if kill_at is None else [KillAt(kill_at)]
    trainer = {"max_steps": 10, "checkpoint_every": 3}
    options, assembly = text_run(
        place,
        torch.device(device),
        sizes,
        name=name,
        precision="bf16",
        deterministic=True,
        resume="auto",
        trainer=trainer,
    )
    train(assembly.loop, options, assembly.folder, assembly.config_text)


def check_resumption(device: torch.device, sizes: Sizes, place: Path) -> Row:
    """Two whole runs and one that was killed and resumed have the same losses, bit for bit."""
    context = multiprocessing.get_context("spawn")
    exits = []
    for name, kill_at in (("whole", None), ("again", None), ("killed", 5), ("killed", None)):
        process = context.Process(target=train_deterministically, args=(place, str(device), sizes, name, kill_at))
        process.start()
        process.join()
        exits.append(process.exitcode)
    whole, again, killed = (losses(place / name) for name in ("whole", "again", "killed"))
    is_right = exits == [0, 0, -signal.SIGKILL, 0] and whole == again == killed and len(whole) == 10
    return "deterministic, killed, resumed", f"losses of {len(whole)} steps", "equal" if is_right else "DIFFERENT"


def build_llama(shape: dict[str, int], device: torch.device, dtype: torch.dtype) -> Decoder:
    """A LLaMA with random weights that do not depend on the device."""
    values: dict[str, Any] = {"max_length": 4096, "vocab_size": 512, **shape}
    config = LlamaConfig(**values)
    with torch.device("meta"):
        model = Decoder(config, select("O1", device.type))
    model = model.to_empty(device="cpu") if device.type == "cpu" else model.to_empty(device=device)
    init_weights(model.named_parameters(), len(model.blocks), seed=1)
    return model.to(dtype)


def check_one_step(device: torch.device) -> Row:
    """Loss and gradients of a LLaMA on the device and on the CPU, in fp32."""
    shape = {name: LLAMA[name] // 4 for name in ("dim", "mlp_dim")} | {"num_layers": 2}
    shape |= {"num_heads": 8, "num_kv_heads": 4}
    tokens = torch.arange(96).view(2, 48) % 500
    outcomes = []
    for place in (torch.device("cpu"), device):
        model = build_llama(shape, place, torch.float32)
        logits = model(tokens.to(place))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten().to(place))
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        outcomes.append([loss.detach().cpu(), *(each.cpu() for each in gradients)])
    error = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*outcomes, strict=True))
    return "LLaMA step, device = CPU", f"{error:.0e}", "equal" if error < 2e-3 else "DIFFERENT"


def check_wide_deep(device: torch.device, sizes: Sizes, place: Path) -> Row:
    """Wide & Deep over cached tables on made-up clicks, on the device and on the CPU."""
    kit = kit_of("recommendation")
    results: list[dict[int, float]] = []
    rates: list[float] = []
    clicks = SyntheticClicks(SyntheticClicksConfig(num_rows=40 * sizes.clicks))
    for where in (torch.device("cpu"), device):
        options = kit.read_options(
            {
                "model": {"family": "wide_deep"},
                "device": str(where),
                "output_dir": str(place / f"clicks-{len(results)}"),
                "data": {"batch_size": sizes.clicks},
                "cache": {"device_rows": 4000},
                "trainer": {"max_steps": 12, "progress": False, "eval_batches": 2, "log_every": 1},
            }
        )
        inputs = RunInputs[Any](train_dataset=clicks)
        assembly = kit.assemble(options, inputs, Rendezvous.open(options.parallel, options.device))
        started = time.perf_counter()
        train(assembly.loop, options, assembly.folder, assembly.config_text)
        rates.append(12 * sizes.clicks / (time.perf_counter() - started))
        results.append(losses(assembly.folder))
    error = max(abs(results[0][step] - loss) / loss for step, loss in results[1].items())
    words = f"{error:.0e} of the losses, {rates[1]:,.0f} samples/s with checks and saves"
    return "Wide & Deep, device = CPU", words, "equal" if error < 1e-2 else "DIFFERENT"


def check_sampler(device: torch.device) -> Row:
    """The log-probabilities of sampled tokens, by the engine and by the network that trains."""
    shape = {"dim": 128, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 256}
    model = build_llama(shape, device, torch.float32)
    prompt = list(range(40, 57))
    with torch.no_grad():
        ((sampled,),) = Engine(model).generate([prompt], SamplingOptions(max_new_tokens=40, temperature=1.0, seed=3))
        text = torch.tensor([prompt + sampled.tokens], device=device)
        hidden = model.hidden(text, Context())[0, len(prompt) - 1 : -1]
        logprobs, _ = model.kernels.linear_log_probs(hidden, model.head_weight, text[0, len(prompt) :])
    error = max(abs(a - b) for a, b in zip(sampled.logprobs, logprobs.tolist(), strict=True))
    return (
        "sampler = trainer",
        f"{error:.0e} of {len(sampled.tokens)} log-probs",
        "equal" if error < 1e-3 else "DIFFERENT",
    )


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median time of a call."""
    times = []
    for index in range(13):
        devices.synchronize(device)
        started = time.perf_counter()
        work()
        devices.synchronize(device)
        if index >= 3:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def measure_kernels(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Bytes moved per second by forward and backward calls, against a copy and against torch's own operations."""
    dtype = torch.bfloat16
    x, gate = (torch.randn(sizes.rows, sizes.width, device=device, dtype=dtype) for _ in range(2))
    weight, bias = (
        torch.ones(sizes.width, device=device, dtype=dtype),
        torch.zeros(sizes.width, device=device, dtype=dtype),
    )
    heads = torch.randn(4, sizes.rows // 4, sizes.width // 128, 128, device=device, dtype=dtype).transpose(1, 2)
    angles = torch.rand(1, sizes.rows // 4, 64, device=device)
    copy = 2 * x.nbytes / seconds(lambda: gate.copy_(x), device)
    yield "copy", f"{copy / 1e9:,.0f} GB/s", ""
    kernels = select("O1", device.type)

    def torch_rotary(input: Tensor, cos: Tensor, sin: Tensor, _: bool) -> Tensor:
        cos, sin, one, two = cos.to(dtype), sin.to(dtype), input[..., :64], input[..., 64:]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    # Torch's own, the arguments, and how many of them have gradients.
    cases: dict[str, tuple[Callable[..., Tensor], list[Any], int]] = {
        "rms_norm": (lambda x, w, eps: functional.rms_norm(x, (sizes.width,), w, eps), [x, weight, 1e-6], 2),
        "layer_norm": (lambda x, w, b, eps: functional.layer_norm(x, w.shape, w, b, eps), [x, weight, bias, 1e-6], 3),
        "swiglu": (lambda gate, up: functional.silu(gate) * up, [gate, x], 2),
        "geglu": (lambda gate, up: functional.gelu(gate, approximate="tanh") * up, [gate, x], 2),
        "rotary": (torch_rotary, [heads, angles, angles, False], 1),
    }
    for name, (other, arguments, num_leaves) in cases.items():
        own = cost(name, *arguments)
        for what, moved in (("forward", own.bytes), ("backward", own.backward_bytes)):
            leaves = num_leaves if what == "backward" else 0
            taken = [
                seconds(pass_of(function, arguments, leaves), device) for function in (getattr(kernels, name), other)
            ]
            share = moved / taken[0] / copy
            words = f"{moved / taken[0] / 1e9:,.0f} GB/s, {share:.0%} of a copy, {taken[1] / taken[0]:.2f}x torch's own"
            yield f"{name} {what}", words, ""


def pass_of(function: Callable[..., Tensor], arguments: list[Any], num_leaves: int) -> Callable[[], object]:
    """A call of the forward pass, or of the backward pass alone, for gradients of the first arguments."""
    if not num_leaves:
        return lambda: function(*arguments)
    leaves = [each.detach().requires_grad_() for each in arguments[:num_leaves]]
    output = function(*leaves, *arguments[num_leaves:])
    gradient = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, leaves, gradient, retain_graph=True)


def measure_products(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Forward and backward: a linear layer in FP8 against bfloat16, and attention of packed rows against a mask."""
    kernels, dtype = select("O1", device.type), torch.bfloat16
    rows = sizes.rows // 2
    x = torch.randn(rows, sizes.width, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(sizes.width, sizes.width, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(rows, sizes.width, device=device, dtype=dtype)

    def both(linear: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(linear(x, weight), [x, weight], gradient)

    flops = 6 * rows * sizes.width**2
    try:
        devices.check_float8(device)
        float8, exact = (seconds(both(each), device) for each in (kernels.float8_linear, kernels.linear))
        yield "float8_linear", f"{flops / float8 / 1e12:,.1f} TFLOP/s, {exact / float8:.2f}x bf16", ""
    except DeviceError as error:
        yield "float8_linear", str(error).splitlines()[0], ""
    length = rows // 4
    documents = (torch.arange(length) * 5 // length).expand(2, length)
    boundaries, longest = find_boundaries(documents)
    on_device = documents.to(device)
    mask = causal_mask(torch.arange(length, device=device), torch.arange(length, device=device), None)
    mask = (mask & (on_device.unsqueeze(2) == on_device.unsqueeze(1))).unsqueeze(1)
    packed = PackedMask(boundaries.to(device), longest, None, lambda: mask)
    query, key, value = (
        torch.randn(2, length, heads, 128, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
        for heads in (32, 8, 8)
    )

    def attend(given: Any) -> Callable[[], object]:
        return lambda: kernels.attention(query, key, value, mask=given, causal=True, scale=0.1).sum().backward()

    one, other = (seconds(attend(each), device) for each in (packed, mask))
    yield "attention of packed rows", f"{1e3 * one:.2f} ms, {other / one:.2f}x a dense mask", ""


def measure_vocabulary(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """FLOP/s of both losses over the vocabulary, against the chunked torch version and whole logits."""
    rows = min(sizes.rows, 8192)
    hidden = torch.randn(rows, sizes.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(sizes.vocabulary, sizes.width, device=device, dtype=torch.bfloat16) / sizes.width**0.5
    targets = torch.randint(0, sizes.vocabulary, (rows,), device=device)
    own = select("O1", device.type)
    for name in ("linear_cross_entropy", "linear_log_probs"):
        flops = cost(name, hidden, weight, targets).flops
        with torch.no_grad():
            taken, chunked = (
                seconds(lambda call=call: call(hidden, weight, targets), device)  # type: ignore[misc]
                for call in (getattr(own, name), implementation(name, "chunked", device.type))
            )
        yield f"{name} forward", f"{flops / taken / 1e12:,.1f} TFLOP/s, {chunked / taken:.2f}x chunked torch", ""


def measure_llama(device: torch.device, sizes: Sizes) -> Iterator[Row]:
    """Training steps and decoding of a LLaMA in bfloat16, against the datasheet and the bandwidth of a copy."""
    model = build_llama(sizes.network, device, torch.bfloat16)
    length = 2048 if device.type != "cpu" else 64
    tokens = torch.randint(0, sizes.network["vocab_size"], (4, length), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        hidden = model.hidden(tokens, Context())
        loss = model.kernels.linear_cross_entropy(
            hidden[:, :-1].flatten(0, 1), model.head_weight, tokens[:, 1:].flatten()
        )
        (loss / tokens.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    taken = seconds(step, device)
    weights = sum(each.numel() for each in model.parameters())
    # Chowdhery et al. (2022): 6 FLOPs a parameter and 12 * layers * width * length for attention, a token.
    flops = tokens.numel() * (6 * weights + 12 * sizes.network["num_layers"] * sizes.network["dim"] * length)
    words = f"{tokens.numel() / taken:,.0f} tokens/s, {flops / taken / 1e12:,.1f} TFLOP/s"
    yield f"train LLaMA of {weights / 1e9:.2f}B", words, ""
    optimizer.state.clear()
    engine, prompt = Engine(model), list(range(16))
    options = SamplingOptions(max_new_tokens=sizes.num_new_tokens, ignore_eos=True)
    for texts in (1, 64) if device.type != "cpu" else (1, 4):
        engine.generate([prompt] * texts, options)
        started = time.perf_counter()
        engine.generate([prompt] * texts, options)
        taken = (time.perf_counter() - started) / sizes.num_new_tokens
        words = f"{1e3 * taken:.2f} ms a step, {texts / taken:,.0f} tokens/s"
        yield f"decode {texts} texts", f"{words}, weights at {2 * weights / taken / 1e9:,.0f} GB/s", ""


def all_rows(device: torch.device, sizes: Sizes, place: Path) -> Iterator[Row]:
    """Every check and measurement, in order; one that raises is a failure of its own."""
    parts: list[Callable[[], Iterator[Row] | Row]] = [
        lambda: check_kernels(device),
        lambda: check_tables(device),
        lambda: check_one_step(device),
        lambda: check_sampler(device),
        lambda: check_training(device, sizes, "fp32", place),
        lambda: check_training(device, sizes, "bf16", place),
        lambda: check_resumption(device, sizes, place),
        lambda: check_wide_deep(device, sizes, place),
        lambda: measure_kernels(device, sizes),
        lambda: measure_products(device, sizes),
        lambda: measure_vocabulary(device, sizes),
        lambda: measure_llama(device, sizes),
    ]
    for part in parts:
        started = time.perf_counter()
        try:
            made = part()
            yield from [made] if isinstance(made, tuple) else made
        except Exception as error:  # noqa: BLE001 (the other rows are wanted as well)
            yield part.__code__.co_names[0], f"{type(error).__name__}: {str(error)[:200]}", "FAILED"
        console.print(f"{part.__code__.co_names[0]}: {time.perf_counter() - started:.0f} s", style="dim")


def main(arguments: list[str]) -> int:
    """Print the table and write it; 1 when a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; default: benchmarks/gpu/results")
    options = parser.parse_args(arguments)
    device = devices.pick(options.device)
    started, sizes = time.perf_counter(), CPU if device.type == "cpu" else GPU
    rows: list[Row] = [("device", devices.describe(device), ""), ("torch", torch.__version__, "")]
    with tempfile.TemporaryDirectory() as place:
        rows += all_rows(device, sizes, Path(place))
    rows.append(("duration", f"{time.perf_counter() - started:.0f} s", ""))
    table = Table("what", "measured", "verdict")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    folder = options.out or (None if device.type == "cpu" else RESULTS)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        name = "-".join(devices.describe(device).lower().split()[:4])
        lines = ["| what | measured | verdict |", "| --- | --- | --- |", *(f"| {' | '.join(row)} |" for row in rows)]
        (folder / f"{name}-{date.today()}.md").write_text("\n".join(lines) + "\n")
    return int(any(row[2].isupper() for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
