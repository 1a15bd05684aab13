"""Training steps and decoding of a LLaMA beside `transformers`, and beside Liger's kernels where they are installed.

    python -m benchmarks.gpu.llama [--size 1b|half|tiny] [--rounds 5] [--device cuda]

All contestants begin with the same weights and take turns in one process, so that ratios are those of pairs; a row has
the median over rounds. MFU is against the dense bfloat16 peak of an H200, 989 TFLOP/s. The losses of the first steps
stand beside each other. On one GPU it takes at most 9 minutes and writes `results/llama-SIZE-DEVICE.md`; with
`--device cpu --size tiny` it shows that it runs.
"""

import datetime
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.core.nn.decoder import Decoder
from kitforge.foundation import device as devices
from kitforge.foundation.dtype import Precision
from kitforge.inference.engine import Engine
from kitforge.inference.sampling import SamplingOptions
from kitforge.models.catalog import config_of
from kitforge.models.loading import build, save
from kitforge.trainer.precision import autocast, use_precision

PEAK = 989e12
RESULTS = Path(__file__).parent / "results"
SIZES: dict[str, dict[str, int]] = {
    # The shape of LLaMA 3.2 1B, half of its layers (four contestants with their moments fit 80 GB), and one that only
    # shows that this runs.
    "1b": {"dim": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 8192, "vocab_size": 128256},
    "half": {"dim": 2048, "num_layers": 8, "num_heads": 32, "num_kv_heads": 8, "mlp_dim": 8192, "vocab_size": 128256},
    "tiny": {"dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 176, "vocab_size": 512},
}
# Rows and tokens of a batch, and new tokens of a decoded text.
BATCHES = {"1b": (2, 4096, 128), "half": (2, 4096, 128), "tiny": (2, 64, 8)}
# A CPU multiplies in FP8 slowly.
SMOKE = {"size": "tiny", "rounds": 1, "BATCHES": {"tiny": (1, 16, 2)}}
Step = Callable[[Tensor], Tensor]


def our_step(model: Decoder, precision: Precision) -> Step:
    """Forward, backward, clipping and AdamW; the loss."""
    device = model.head_weight.device
    use_precision(model, precision, device)

    def loss_of(tokens: Tensor) -> Tensor:
        with autocast(device, precision):
            hidden = model.hidden(tokens[:, :-1].contiguous()).flatten(0, 1)
            targets = tokens[:, 1:].flatten()
            return model.kernels.linear_cross_entropy(hidden, model.head_weight, targets) / len(targets)

    return with_optimizer(model, loss_of)


def peer_step(model: nn.Module) -> Step:
    """The same with a network of `transformers` under autocast."""
    device = next(model.parameters()).device

    def loss_of(tokens: Tensor) -> Tensor:
        with autocast(device, "bf16"):
            logits = model(tokens[:, :-1].contiguous()).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return with_optimizer(model, loss_of)


def with_optimizer(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def new_model(size: str, device: torch.device) -> Decoder:
    config = config_of({"family": "llama", "max_length": 8192, "tie_embeddings": size != "tiny", **SIZES[size]})
    return build(config, device=device, level="O1", seed=0)


def new_peer(folder: Path, device: torch.device, *, with_liger: bool = False) -> nn.Module:
    """The weights of a folder in `transformers`, with flash attention of torch."""
    import transformers

    if with_liger:
        import liger_kernel.transformers

        liger_kernel.transformers.apply_liger_kernel_to_llama()
    made: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return made.to(device)


def contestants(size: str, device: torch.device, folder: Path) -> dict[str, Callable[[], Step]]:
    """By name: how to make one."""
    found: dict[str, Callable[[], Step]] = {
        "ours": lambda: our_step(new_model(size, device), "bf16"),
        "ours, fp8": lambda: our_step(new_model(size, device), "fp8"),
    }
    if is_smoke():
        return found
    found["transformers"] = lambda: peer_step(new_peer(folder, device))
    if importlib.util.find_spec("liger_kernel"):
        # It patches the classes of transformers, so it comes last.
        found["transformers + Liger"] = lambda: peer_step(new_peer(folder, device, with_liger=True))
    return found


def train(size: str, device: torch.device, folder: Path, rounds: int) -> list[str]:
    """Rows of tokens a second, MFU and ratios, and the losses of the first steps."""
    rows, length, _ = BATCHES[size]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SIZES[size]["vocab_size"], (4, rows, length + 1), generator=generator).to(device)
    steps = {name: make() for name, make in contestants(size, device, folder).items()}
    losses = {name: [float(step(tokens[0])) for _ in range(5)] for name, step in steps.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            devices.synchronize(device)
            started = time.perf_counter()
            step(tokens[number % 4])
            devices.synchronize(device)
            seconds[name].append(time.perf_counter() - started)
    shape = SIZES[size]
    weights = sum(each.numel() for each in new_model(size, torch.device("meta")).parameters())
    # Chowdhery et al. (2022): 6 FLOPs a parameter and 12 * layers * width * length for attention, a token.
    flops = rows * length * (6 * weights + 12 * shape["num_layers"] * shape["dim"] * length)
    lines = ["| training | tokens/s | MFU | ours / it | losses of five steps |", "|---|---:|---:|---:|---|"]
    for name, taken in seconds.items():
        middle = statistics.median(taken)
        ratio = statistics.median(other / own for own, other in zip(seconds["ours"], taken, strict=True))
        curve = " ".join(f"{loss:.3f}" for loss in losses[name])
        cells = f"{rows * length / middle:,.0f} | {flops / middle / PEAK:.1%} | {ratio:.2f}x | {curve}"
        lines.append(f"| {name} | {cells} |")
    return lines


def decode(size: str, device: torch.device, folder: Path, rounds: int) -> list[str]:
    """Rows of tokens a second with one text and with 64, in bfloat16."""
    model = new_model(size, device).to(torch.bfloat16).eval().requires_grad_(False)
    peer: Any = None if is_smoke() else new_peer(folder, device).to(torch.bfloat16).eval()
    engine, new = Engine(model), BATCHES[size][2]
    num_bytes = 2 * sum(each.numel() for each in model.parameters())
    lines = ["", "| decoding | texts | tokens/s | ours / it | weights read GB/s |", "|---|---:|---:|---:|---:|"]
    for texts in (1, 64) if device.type != "cpu" else (1, 4):
        prompts = torch.arange(3, 35).repeat(texts, 1)
        options = SamplingOptions(max_new_tokens=new, ignore_eos=True)

        def theirs(prompts: Tensor = prompts) -> object:
            size = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
            return peer.generate(prompts.to(device), attention_mask=torch.ones_like(prompts).to(device), **size)

        runs: dict[str, Callable[[], object]] = {
            "ours": lambda prompts=prompts, options=options: engine.generate(prompts.tolist(), options),  # type: ignore[misc]
            **({} if peer is None else {"transformers": theirs}),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds + 1):
            for name, run in runs.items():
                devices.synchronize(device)
                started = time.perf_counter()
                run()
                devices.synchronize(device)
                seconds[name].append(time.perf_counter() - started)
        for name, (_, *taken) in seconds.items():
            middle = statistics.median(taken)
            ratio = statistics.median(other / own for own, other in zip(seconds["ours"][1:], taken, strict=True))
            cells = f"{texts * new / middle:,.0f} | {ratio:.2f}x | {num_bytes * new / middle / 1e9:,.0f}"
            lines.append(f"| {name} | {texts} | {cells} |")
    return lines


def main() -> None:
    """Print the table and, on an accelerator, write it."""
    parser = CommandLine(__doc__)
    parser.add_argument("--size", default="1b", choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse(SMOKE, globals())
    device = devices.pick(given.device)
    title = f"# LLaMA {given.size} on {devices.describe(device)}"
    words = f"{datetime.date.today()}, torch {torch.__version__}, bfloat16, {given.rounds} interleaved rounds."
    with tempfile.TemporaryDirectory() as folder:
        save(new_model(given.size, torch.device("cpu")), Path(folder), extra={"bos_token_id": 0, "eos_token_id": 1})
        lines = [title, "", words, "", *train(given.size, device, Path(folder), given.rounds)]
        lines += decode(given.size, device, Path(folder), given.rounds)
    sys.stdout.write("\n".join(lines) + "\n")
    if device.type != "cpu":
        name = devices.describe(device).replace(" ", "-")
        write_result(RESULTS / f"llama-{given.size}-{name}.md", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
