"""A step of Wide & Deep on an accelerator: tables whole in its memory, and cached at a footprint of 0.8.

    python -m benchmarks.gpu.wide_deep [--steps 20] [--rounds 3] [--device cuda]

Batch 16,000, 26 fields with 5,860,000 rows of 16 numbers, a tower of seven layers of 1024, bfloat16, row-wise Adagrad:
the shape of `benchmarks/recommender/wide_deep.py`. The cached tables hold four fifths of the rows that the batches
need, the rest is in pinned host memory. The trainer's prefetcher plans two batches ahead, as a user would have it. Both
take turns; ratios are those of pairs. On one GPU it takes at most 9 minutes and writes `results/wide-deep-DEVICE.md`.
"""

import datetime
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

import torch

from benchmarks.command_line import CommandLine, write_result
from benchmarks.recommender import clicks, wide_deep
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation import device as devices
from kitforge.foundation.types import Cursor
from kitforge.trainer.loop import Loop

RESULTS = Path(__file__).parent / "results"
FOOTPRINT = 0.8
AHEAD = 2  # batches
TARGET = 1.34e6  # samples a second
SMOKE = wide_deep.SMALLEST | {"steps": 1, "rounds": 1}


def rows_needed() -> int:
    """Distinct rows of the four batches, of all fields."""
    ids = torch.cat([torch.from_numpy(clicks.batch(seed)[0]) for seed in range(4)])
    return sum(len(torch.unique(column)) for column in ids.t())


def new_loop(device: torch.device, **cache: int) -> tuple[wide_deep.Steps, Loop]:
    """The trainer's own loop; its steps are called one by one."""
    rules = wide_deep.OURS["ours rowwise_adagrad"]
    dim, hidden = wide_deep.CONFIGURATIONS["benchmark"]
    task = wide_deep.Steps(dim, hidden, rules, "bf16", on=str(device), **cache)
    world = ALONE if device.type == "cpu" else World(device=device)
    loop = Loop(task, task.options, world)
    loop.model.train()
    loop.state.optimizer.init_state()
    return task, loop


def main() -> None:
    """Print the table and, on an accelerator, write it."""
    parser = CommandLine(__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    given = parser.parse(SMOKE, vars(clicks), vars(wide_deep))
    device = devices.pick(given.device)
    runs = {
        "whole": new_loop(device, prefetch_batches=AHEAD),
        f"cached at {FOOTPRINT}": new_loop(device, prefetch_batches=AHEAD, device_rows=int(FOOTPRINT * rows_needed())),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(given.rounds + 1):
        for name, (task, loop) in runs.items():
            with closing(task.steps(loop.model, Cursor())) as steps:
                devices.synchronize(device)
                started = time.perf_counter()
                for _ in range(given.steps):
                    loop._step(next(steps))
                devices.synchronize(device)
                if number:
                    seconds[name].append((time.perf_counter() - started) / given.steps)
    whole, cached = seconds.values()
    step = statistics.median(whole)
    ratio = statistics.median(other / own for own, other in zip(whole, cached, strict=True))
    lines = [
        f"# Wide & Deep on {devices.describe(device)}",
        "",
        f"{datetime.date.today()}, torch {torch.__version__}, bf16, batch {clicks.BATCH:,}; median of {given.rounds} "
        f"rounds of {given.steps} steps.",
        "",
        "| tables | ms a step | samples/s | target |",
        "|---|---:|---:|---|",
        f"| whole | {1e3 * step:.1f} | {clicks.BATCH / step:,.0f} | {TARGET:,.0f} |",
        f"| cached at {FOOTPRINT} | {1e3 * statistics.median(cached):.1f} | {ratio:.2f}x the time | 1.5x |",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    if device.type != "cpu":
        name = f"wide-deep-{devices.describe(device).replace(' ', '-')}.md"
        write_result(RESULTS / name, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
