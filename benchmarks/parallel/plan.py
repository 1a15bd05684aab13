"""The memory that `kitforge plan` foresees of a rank beside that which torch's profiler measures in real steps.

Run from the checkout: `python -m benchmarks.parallel.plan [--runs 3]`; it writes its table to
benchmarks/parallel/plan.md, the worst row first. Each row is one small network on one to four ranks of this CPU.
Measured is the least of `3 x runs` steps of each rank, of the rank that has the most at its least; the most of those
steps has a column of its own, as gloo's threads may hold a buffer of a block a while longer.
"""

import datetime
import os
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.foundation.device import describe, pick
from tests.distributed.ranks import ask_ranks
from tests.measured_step import measured_range, options_of, traced, training_peak

PAGE = Path(__file__).with_suffix(".md")
FULL, SELECTIVE = ({"trainer.activation_checkpointing": each} for each in ("full", "selective"))
SHORT = {"data.sequence_length": 8}
TWO, FOUR = {"parallel.shard": 2}, {"parallel.shard": 2, "parallel.tensor": 2}
STAGES = {"parallel.pipeline": 2, "trainer.micro_batch_size": 1}
ROLLOUTS = {"rl.prompts_per_rollout": 4, "rollout.max_new_tokens": 32}
TABLE = {"num_buckets": 50_000, "kind": "integer"}
SCHEMA = {"label": {"name": "y"}, "numeric": {"I1": {}}, "categorical": {"C1": TABLE, "C2": TABLE}}
CLICKS = {"task": "recommendation", "model": "wide_deep", "data.schema": SCHEMA, "data.batch_size": 1024}
CONFIGURATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"precision": "bf16", **FULL},
    {"model": "gpt2_tiny", **SELECTIVE},
    {"model": "llama_moe_tiny", "precision": "bf16", **SELECTIVE},
    {"lora.rank": 4},
    {"trainer.offload": "optimizer"},
    {"trainer.offload": "optimizer_and_gradients"},
    {"task": "text_classification"},
    {"task": "dpo", "precision": "bf16"},
    {"task": "ppo", **ROLLOUTS},
    {"task": "distill", **ROLLOUTS},
    CLICKS,
    {**CLICKS, "cache.device_rows": 4_000},
    {"parallel.data": 2, "trainer.micro_batch_size": 1},
    {"parallel.tensor": 2, "precision": "bf16"},
    {"parallel.tensor": 2, "parallel.sequence_parallel": False},
    {"parallel.context": 2},
    {"model": "llama_moe_tiny", "parallel.data": 2, "parallel.expert": 2},
    {**TWO, "parallel.zero_stage": 1, "trainer.micro_batch_size": 1, **SHORT},
    {**TWO, "parallel.zero_stage": 2, "trainer.micro_batch_size": 1, **SHORT},
    {**TWO},
    {**TWO, **SHORT},
    {**TWO, **SHORT, **FULL, "precision": "bf16"},
    {**TWO, "data.sequence_length": 256},
    {**FOUR, "precision": "bf16"},
    {"parallel.data": 2, **TWO, **FULL},
    *({**STAGES, "parallel.schedule": each} for each in ("1f1b", "interleaved", "zero_bubble", "zero_bubble_v")),
    {**STAGES, **FULL, "precision": "bf16"},
    {**STAGES, "parallel.tensor": 2},
    {"model": "llama_moe_tiny", **STAGES, "parallel.data": 2, "parallel.schedule": "zero_bubble_v"},
)
SMOKE = {"CONFIGURATIONS": CONFIGURATIONS[:1], "runs": 1}


def row(choices: dict[str, Any], foreseen: int, least: int, most: int) -> str:
    shown = {name: value for name, value in choices.items() if name not in ("data.schema", *ROLLOUTS)}
    words = " ".join(f"{name}={value}" for name, value in shown.items()) or "the defaults"
    figures = [f"{size / 2**20:.3f}" for size in (foreseen, least, most)]
    return f"| {words} | {' | '.join(figures)} | {foreseen / least - 1:+.2%} |"


def asked_for(choices: dict[str, Any]) -> Any:
    """The options of a row, whose task is text_generation unless it names another."""
    task = choices.get("task", "text_generation")
    shared = {} if task == "recommendation" else {"model": "llama_tiny", "model.num_layers": 4, "data.batch_size": 4}
    return options_of(shared | {name: value for name, value in choices.items() if name != "task"}, task)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse(SMOKE, globals()).runs
    asked = [asked_for(each) for each in CONFIGURATIONS]
    answers = ask_ranks(
        {number: (each.parallel.world_size, measured_range, each, runs) for number, each in enumerate(asked)}
    )
    found = []
    for number, (choices, options) in enumerate(zip(CONFIGURATIONS, asked, strict=True)):
        least, most = (max(each) for each in zip(*answers[number], strict=True))
        peaks = [training_peak(traced(options, index)) for index in range(options.parallel.pipeline)]
        found.append((choices, max(peaks), least, most))
    found.sort(key=lambda each: -abs(each[1] / each[2] - 1))
    errors = [abs(foreseen / least - 1) for _, foreseen, least, _ in found]
    lines = [
        "# Foreseen and measured memory",
        "",
        f"{describe(pick('cpu'))}, torch {torch.__version__}, {datetime.date.today()}; load average "
        f"{os.getloadavg()[0]:.1f}. `llama_tiny` of 4 blocks unless a row names another, 4 rows of 64 tokens in a",
        "step; MiB of a rank; written by `python -m benchmarks.parallel.plan`. "
        f"Median error {statistics.median(errors):.2%}, worst {max(errors):.2%}, of {len(errors)} configurations.",
        "",
        "| configuration | foreseen | measured, least step | most | error |",
        "|---|---:|---:|---:|---:|",
        *(row(*each) for each in found),
    ]
    write_result(PAGE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
