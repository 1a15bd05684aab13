"""How long training stands still for a checkpoint, against one plain memory copy of the same state.

Run from the checkout: `python -m benchmarks.core.checkpoint_stall`. It writes its table to
benchmarks/core/checkpoint_stall.md. The state is a GPT-2's parameters and their two AdamW moments in fp32. The plain
copy is one `copy_` of one flat tensor of as many bytes into warm memory; the same is also done
tensor by tensor. Copies and saves alternate, nothing is being written while they are timed, and medians are shown.
"""

import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.foundation.device import describe, pick

TABLE = Path(__file__).with_suffix(".md")
SIZES = {"GPT-2, 6 x 384": (6, 384, 8192), "GPT-2 small, 12 x 768": (12, 768, 50257)}
SMOKE = {"SIZES": {"GPT-2, 1 x 16": (1, 16, 64)}, "rounds": 1}


def parameters(layers: int, dim: int, vocabulary: int) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, dim), "position": (1024, dim), "norm": (dim,)}
    for layer in range(layers):
        shapes |= {f"{layer}.qkv": (3 * dim, dim), f"{layer}.output": (dim, dim)}
        shapes |= {f"{layer}.up": (4 * dim, dim), f"{layer}.down": (dim, 4 * dim)}
        shapes |= {f"{layer}.bias{number}": (width * dim,) for number, width in enumerate((3, 1, 4, 1))}
        shapes |= {f"{layer}.norm{number}": (dim,) for number in range(4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def moments(model: dict[str, Tensor]) -> dict[str, Tensor]:
    optimizer: dict[str, Tensor] = {}
    for name, tensor in model.items():
        optimizer |= {f"{name}.exp_avg": tensor.clone(), f"{name}.exp_avg_sq": tensor.clone()}
        optimizer[f"{name}.step"] = torch.tensor(1.0)
    return optimizer


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(root: Path, model: dict[str, Tensor], rounds: int) -> dict[str, float]:
    optimizer = moments(model)
    tensors = [*model.values(), *optimizer.values()]
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    flat = torch.ones(num_bytes // 4)
    flat_target, targets = flat.clone(), [tensor.clone() for tensor in tensors]
    with closing(CheckpointWriter(root, keep_last=1)) as writer:

        def save() -> None:
            writer.save(len(times["stall"]), model=model.items(), optimizer=optimizer.items(), state={})

        def copy_pieces() -> None:
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor)

        work = {"flat": lambda: flat_target.copy_(flat), "pieces": copy_pieces, "stall": save, "write": writer.wait}
        times: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(rounds + 1):
            for name, function in work.items():
                times[name].append(seconds(function))
    verify = seconds(lambda: open_checkpoint(step_folder(root, rounds)))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {"bytes": num_bytes, "first": times["stall"][0], "verify": verify, **medians}


def table(results: dict[str, dict[str, float]], rounds: int) -> str:
    lines = [
        "# Stall of a checkpoint",
        "",
        f"{describe(pick('cpu'))}, torch {torch.__version__}, {datetime.date.today()}; medians of {rounds} rounds; "
        f"load average {os.getloadavg()[0]:.0f} at the end (1 is ours).",
        "The first save also maps the buffers, once a run. Writing and checking are bound by SHA-256 and the disk.",
        "",
        "| State | Size, MB | One flat copy, ms | Copy tensor by tensor, ms | Stall of save, ms "
        "| Stall / flat copy (target 1.2) | First save, ms | Written behind, s | Checked at opening, s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, got in results.items():
        lines.append(
            f"| {name} | {got['bytes'] / 1e6:.0f} | {got['flat'] * 1e3:.1f} | {got['pieces'] * 1e3:.1f} "
            f"| {got['stall'] * 1e3:.1f} | {got['stall'] / got['flat']:.2f} | {got['first'] * 1e3:.0f} "
            f"| {got['write']:.2f} | {got['verify']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse(SMOKE, globals()).rounds
    results = {}
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(Path(folder), parameters(*size), rounds)
    write_result(TABLE, table(results, rounds))


if __name__ == "__main__":
    main()
