"""Check kernels, training steps, resumption and sampling on this machine's accelerator, then measure speed.

`make gpu-check` takes at most 9 minutes on one GPU. It prints a table and writes it to
`benchmarks/gpu/results/DEVICE-DATE.md`; the exit status is 1 when a row is wrong. On a machine without an accelerator
it runs on the CPU with small sizes, prints the table and writes nothing. It needs torch, numpy, safetensors and rich
only, so it runs where Hydra and the data extras are not installed.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional

from benchmarks.gpu import decode_step, texts
from benchmarks.gpu import kernels as speed
from benchmarks.gpu.kernels import CPU, GPU, LLAMA, Row, Sizes
from kitforge.core.nn.context import Context
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.foundation import device as devices
from kitforge.foundation.log import console
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.kits.kit import RunInputs
from kitforge.kits.registry import kit_of
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.run_folder import train
from kitforge.verify.kernel_cases import TABLE_TOLERANCE, has_same_mask, kernel_errors, table_errors, tolerance

RESULTS = Path(__file__).parent.parent / "benchmarks" / "gpu" / "results"


def check_kernels(device: torch.device) -> Iterator[Row]:
    """Outputs and gradients at O1 in each dtype against the float64 references."""
    for name, errors in kernel_errors(device, "O1"):
        words = ", ".join(f"{str(dtype).removeprefix('torch.')} {error:.0e}" for dtype, error in errors.items())
        is_right = all(error < tolerance(name, dtype) for dtype, error in errors.items())
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
    # They are copies of one process that has imported what all need, and has not touched the device.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in sys.modules if name.startswith(("benchmarks.", "kitforge."))])
    exits = []
    for name, kill_at in (("whole", None), ("again", None), ("killed", 5), ("killed", None)):
        process = context.Process(target=train_deterministically, args=(place, str(device), sizes, name, kill_at))
        process.start()
        process.join()
        exits.append(process.exitcode)
    whole, again, killed = (losses(place / name) for name in ("whole", "again", "killed"))
    is_right = exits == [0, 0, -signal.SIGKILL, 0] and whole == again == killed and len(whole) == 10
    return "deterministic, killed, resumed", f"losses of {len(whole)} steps", "equal" if is_right else "DIFFERENT"


def check_one_step(device: torch.device) -> Row:
    """Loss and gradients of a LLaMA on the device and on the CPU, in fp32."""
    shape = {name: LLAMA[name] // 4 for name in ("dim", "mlp_dim")} | {"num_layers": 2}
    shape |= {"num_heads": 8, "num_kv_heads": 4}
    tokens = torch.arange(96).view(2, 48) % 500
    outcomes = []
    for place in (torch.device("cpu"), device):
        model = speed.build_llama(shape, place, torch.float32)
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
    model = speed.build_llama(shape, device, torch.float32)
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


# In order. Each takes the device, the sizes and a folder.
PARTS: dict[str, Callable[[torch.device, Sizes, Path], Iterator[Row] | Row]] = {
    "kernels": lambda device, *_: check_kernels(device),
    "tables": lambda device, *_: check_tables(device),
    "step": lambda device, *_: check_one_step(device),
    "sampler": lambda device, *_: check_sampler(device),
    "texts": lambda device, *_: texts.check_texts(device),
    "decode_step": lambda device, sizes, _: (
        decode_step.check_decode_step(device, sizes) if device.type == "cuda" else iter(())
    ),
    "half_precision": lambda device, *_: texts.check_half_precision(device),
    "groups": lambda device, _, place: texts.check_groups(device, place),
    "train_fp32": lambda device, sizes, place: check_training(device, sizes, "fp32", place),
    "train_bf16": lambda device, sizes, place: check_training(device, sizes, "bf16", place),
    "resumption": check_resumption,
    "wide_deep": check_wide_deep,
    "speed_kernels": lambda device, sizes, _: speed.measure_kernels(device, sizes),
    "speed_products": lambda device, sizes, _: speed.measure_products(device, sizes),
    "speed_experts": lambda device, sizes, _: speed.measure_experts(device, sizes),
    "speed_vocabulary": lambda device, sizes, _: speed.measure_vocabulary(device, sizes),
    "speed_decoding": lambda device, sizes, _: speed.measure_decoding(device, sizes),
    "speed_tables": lambda device, sizes, _: speed.measure_tables(device, sizes),
    "speed_llama": lambda device, sizes, _: speed.measure_llama(device, sizes),
    "speed_texts": lambda device, sizes, _: texts.measure_texts(device, sizes),
    "speed_decode_step": lambda device, sizes, _: decode_step.measure_decode_step(device, sizes),
    "speed_groups": lambda device, sizes, _: texts.measure_groups(device, sizes),
}


def all_rows(device: torch.device, sizes: Sizes, place: Path, names: Collection[str]) -> Iterator[Row]:
    """The checks and measurements of these names, in order; one that raises is a failure of its own."""
    for name, part in PARTS.items():
        if name not in names:
            continue
        started = time.perf_counter()
        try:
            made = part(device, sizes, place)
            for row in [made] if isinstance(made, tuple) else made:
                # A run that is cut off has shown what it found.
                console.print(*row, style="dim")
                yield row
        except Exception as error:  # noqa: BLE001 (the other rows are wanted as well)
            traceback.print_exc()
            yield name, f"{type(error).__name__}: {str(error)[:200]}", "FAILED"
        console.print(f"{name}: {time.perf_counter() - started:.0f} s", style="dim")


def main(arguments: list[str]) -> int:
    """Print the table and write it; 1 when a row is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, ...")
    parser.add_argument("--out", type=Path, default=None, help="folder of the results; default: benchmarks/gpu/results")
    parser.add_argument("--only", nargs="+", default=list(PARTS), choices=PARTS, help="some of the parts")
    options = parser.parse_args(arguments)
    device = devices.pick(options.device)
    started, sizes = time.perf_counter(), CPU if device.type == "cpu" else GPU
    rows: list[Row] = [("device", devices.describe(device), ""), ("torch", torch.__version__, "")]
    with tempfile.TemporaryDirectory() as place:
        rows += all_rows(device, sizes, Path(place), options.only)
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
