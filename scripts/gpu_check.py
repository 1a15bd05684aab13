"""Train and check the kernels on this machine's accelerator, or on its CPU where there is none; prints a table.

Needs torch, numpy, safetensors and rich only, so that it runs where Hydra and the data extras are not installed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from kitforge.core.kernels.dispatch import REFERENCE, Kernels, select
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.foundation import device as devices
from kitforge.foundation.log import console
from kitforge.kits.transformers.build import TASKS, Inputs
from kitforge.trainer.run_folder import train

KIT = TASKS["text_generation"]

STEPS = 20
SHAPE = {"family": "llama", "dim": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "mlp_dim": 1408}


def kernel_cases(device: torch.device) -> dict[str, tuple[Callable[[Kernels], Callable[..., Tensor]], list[Any]]]:
    """For every kernel: how to get it, and its arguments in float64."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    angles = torch.rand(1, 33, 8, dtype=torch.float32, device=device)
    targets = torch.randint(0, 301, (37,), device=device)
    targets[::5] = -100
    return {
        "linear": (lambda kernels: kernels.linear, [random(37, 48), random(64, 48), random(64)]),
        "rms_norm": (lambda kernels: lambda x, w: kernels.rms_norm(x, w, 1e-6), [random(37, 48), random(48)]),
        "rotary": (
            lambda kernels: lambda x: kernels.rotary(x, angles.cos(), angles.sin(), False),
            [random(2, 4, 33, 24)],
        ),
        "swiglu": (lambda kernels: kernels.swiglu, [random(37, 48), random(37, 48)]),
        "attention": (
            lambda kernels: lambda q, k, v: kernels.attention(q, k, v, mask=None, causal=True, scale=0.25),
            [random(2, 4, 33, 16), random(2, 2, 33, 16), random(2, 2, 33, 16)],
        ),
        "linear_cross_entropy": (
            lambda kernels: lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, targets),
            [random(37, 48), random(301, 48)],
        ),
    }


def check_kernels(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """The largest difference of outputs and gradients between O1 and the references, in float64."""
    for name, (get, arguments) in kernel_cases(device).items():
        results = []
        for kernels in (REFERENCE, select("O1", device.type)):
            output = get(kernels)(*arguments)
            gradients = torch.autograd.grad(output.sum() if output.dim() else output, arguments)
            results.append([output, *gradients])
        worst = max((one - other).abs().max().item() for one, other in zip(*results, strict=True))
        yield f"kernel {name}", f"{worst:.1e}", "equal" if worst < 1e-9 else "DIFFERENT"


def check_training(device: torch.device, precision: str, place: Path) -> tuple[str, str, str]:
    """Twenty steps of a small LLaMA on Python's own sources: does the loss fall, and how fast does it go?"""
    options = KIT.read_options(
        {
            "model": SHAPE,
            "device": str(device),
            "precision": precision,
            "output_dir": str(place / precision),
            "data": {"train": "python_stdlib", "sequence_length": 512, "batch_size": 16, "cache": str(place / "cache")},
            "trainer": {"max_steps": STEPS, "progress": False, "eval_batches": 2, "eval_first": True},
        }
    )
    assembly = KIT.assemble(options, Inputs(), Rendezvous.open(options.parallel, options.device))
    before = assembly.loop.evaluate()["eval/loss"]
    started = time.perf_counter()
    metrics = train(assembly.loop, options, assembly.folder, assembly.config_text)
    devices.synchronize(device)
    rate = STEPS * 16 * 512 / (time.perf_counter() - started)
    fell = metrics["eval/loss"] < before - 0.5
    words = f"loss {before:.2f} -> {metrics['eval/loss']:.2f}, {rate:,.0f} tokens/s with checks and saves"
    return f"train {precision}", words, "learns" if fell else "DOES NOT LEARN"


def main() -> None:
    """Print the table; the exit status is 1 when a row is wrong."""
    device = devices.pick()
    rows = [("device", devices.describe(device), "")]
    rows += check_kernels(device)
    with tempfile.TemporaryDirectory() as place:
        rows += [check_training(device, precision, Path(place)) for precision in ("fp32", "bf16")]
    table = Table("what", "measured", "verdict", title=f"torch {torch.__version__}", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    raise SystemExit(any(row[2].isupper() for row in rows))


if __name__ == "__main__":
    main()
