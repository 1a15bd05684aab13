"""The time of a step that `kitforge plan` foresees beside that of real steps.

Run from the checkout: `OMP_NUM_THREADS=1 python -m benchmarks.parallel.plan_time [--steps 15]`; it calibrates this
machine, writes its table to benchmarks/parallel/plan_time.md, the worst row first. Each row is one network on one or
two ranks of a thread each. Of these networks the calibration has none: it has products, streams, messages and three
small steps of other sizes.
"""

import datetime
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.cli.calibrate import measured_cluster
from kitforge.core.parallel.plan.step_time import Speed
from kitforge.foundation.config import from_dict
from kitforge.foundation.device import describe, pick
from kitforge.kits.planning import ClusterConfig, plan_memory
from kitforge.kits.registry import kit_of
from tests.distributed.ranks import ask_ranks
from tests.measured_step import options_of, real_step

TABLE = Path(__file__).with_suffix(".md")
WIDE = {"model.dim": 384, "model.num_heads": 6, "model.num_kv_heads": 2, "model.mlp_dim": 1024}
LONG = {"data.sequence_length": 256}
FULL, SELECTIVE = ({"trainer.activation_checkpointing": each} for each in ("full", "selective"))
ACCUMULATED = {"trainer.micro_batch_size": 2}
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"data.batch_size": 32},
    WIDE,
    {**WIDE, **LONG},
    {**WIDE, **FULL},
    {**WIDE, **SELECTIVE, **ACCUMULATED},
    {**WIDE, **LONG, "precision": "bf16"},
    {"model": "gpt2_tiny", **LONG},
    {"model": "llama_moe_tiny"},
    {**WIDE, "parallel.data": 2},
    {**WIDE, "parallel.shard": 2},
    {**WIDE, "parallel.shard": 2, "parallel.zero_stage": 2, **ACCUMULATED},
    {**WIDE, "parallel.tensor": 2},
    {**WIDE, **LONG, "parallel.context": 2},
    {**WIDE, "parallel.pipeline": 2, **ACCUMULATED},
    {**WIDE, "parallel.pipeline": 2, "parallel.schedule": "zero_bubble", **ACCUMULATED},
)
# By the number of ranks, which share this machine.
CLUSTERS: dict[int, ClusterConfig] = {}
WITHOUT_MEASURES = ClusterConfig(speed=Speed(peak_tflops={"fp32": 0.1}, memory_gb_per_s=8.0, launch_us=10.0))
SMOKE = {"CONFIGURATIONS": CONFIGURATIONS[:1], "CLUSTERS": {1: WITHOUT_MEASURES}, "steps": 2}


def step_seconds(_rank: int, options: Any, steps: int) -> float:
    """The median time of a step on this rank."""
    _, run = real_step(options)
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def row(choices: dict[str, Any], foreseen: float, measured: float, causes: dict[str, float]) -> str:
    words = " ".join(f"{name}={value}" for name, value in choices.items()) or "the defaults"
    most = ", ".join(f"{name} {share:.0%}" for name, share in sorted(causes.items(), key=lambda each: -each[1])[:3])
    return f"| {words} | {foreseen * 1e3:.1f} | {measured * 1e3:.1f} | {foreseen / measured - 1:+.1%} | {most} |"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse(SMOKE, globals()).steps
    shared = {"model.num_layers": 4, "data.batch_size": 8}
    asked = [options_of(shared | each) for each in CONFIGURATIONS]
    answers = dict[int, list[float]]()
    for ranks in sorted({each.parallel.world_size for each in asked}):
        if ranks not in CLUSTERS:
            CLUSTERS[ranks] = from_dict(ClusterConfig, measured_cluster(ranks, pick("cpu")), "cluster")
        own = {number: each for number, each in enumerate(asked) if each.parallel.world_size == ranks}
        answers |= ask_ranks({number: (ranks, step_seconds, each, steps) for number, each in own.items()})
    found = []
    for number, (choices, options) in enumerate(zip(CONFIGURATIONS, asked, strict=True)):
        cluster = CLUSTERS[options.parallel.world_size]
        foreseen = plan_memory(kit_of("text_generation"), options, cluster).time(cluster)
        assert foreseen is not None
        causes = {name: seconds / foreseen.seconds for name, seconds in foreseen.by_cause.items()}
        found.append((choices, foreseen.seconds, max(answers[number]), causes))
    found.sort(key=lambda each: -abs(each[1] / each[2] - 1))
    errors = [abs(foreseen / measured - 1) for _, foreseen, measured, _ in found]
    lines = [
        "# Foreseen and measured time of a step",
        "",
        f"{describe(pick('cpu'))} a rank, torch {torch.__version__}, {datetime.date.today()}; load average "
        f"{os.getloadavg()[0]:.1f}. `llama_tiny` of 4 blocks unless a row names another, 8 rows of 64 tokens a step;",
        "milliseconds, measured is the median; written by `python -m benchmarks.parallel.plan_time`. Median error "
        f"{statistics.median(errors):.1%}, worst {max(errors):.1%}, of {len(errors)} configurations.",
        "",
        "| configuration | foreseen | measured | error | most of what is foreseen |",
        "|---|---:|---:|---:|---|",
        *(row(*each) for each in found),
        "",
        "Over 15 % off are two ranks that exchange in every block, and steps with more of the host than a plain",
        "one, by which launches are counted: selective recomputation takes each operation through a dispatch mode",
        "of Python, and weight gradients of their own are a queue of closures. These causes were not measured",
        "apart.",
    ]
    write_result(TABLE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
