"""The search of `parallel=auto` beside a trace of every layout: the order of memory, the order of time, and the best.

Run from the checkout: `python -m benchmarks.parallel.layouts`; it takes about a quarter of an hour of one processor and
writes its figures to benchmarks/parallel/layouts.md. The network is `gpt2_tiny` (4 blocks) with 8 rows of 32 tokens in
a step, on 8 ranks of a CPU of an assumed speed. Layouts that a real run refuses are left out.
"""

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.parallel.plan.search import Columns
from kitforge.foundation.errors import ConfigError
from kitforge.kits.auto_layout import ASSUMED, NUM_FOUND, LayoutSearch
from kitforge.kits.planning import ClusterConfig, plan_memory
from kitforge.kits.registry import kit_of
from tests.measured_step import options_of

PAGE = Path(__file__).with_suffix(".md")
NUM_RANKS, NUM_BEST = 8, 15
CHOICES: dict[str, Any] = {"model": "gpt2_tiny", "data.batch_size": 8, "data.sequence_length": 32}
GIVEN: dict[str, Any] = {}
# Of the layouts those that fit.
PARTS = (1.0, 0.5, 0.25)
# How far two figures lie apart whose order counts.
APART = 1.02
ONE = {"parallel.pipeline": 1, "parallel.shard": 1, "parallel.context": 1, "trainer.activation_checkpointing": "none"}
SMOKE = {"NUM_RANKS": 2, "PARTS": (1.0,), "GIVEN": ONE | {"trainer.micro_batch_size": 4}}


def words_of(options: Any) -> str:
    """A layout in words."""
    own, trainer = options.parallel, options.trainer
    rows = trainer.micro_batch_size or CHOICES["data.batch_size"] // own.num_replicas
    words = f"{own.describe()}, zero_stage={own.zero_stage}, {own.schedule}, micro-batches of {rows}"
    return f"{words}, {trainer.activation_checkpointing}"


def traced(search: LayoutSearch, columns: Columns, cluster: ClusterConfig) -> tuple[list[int], Any, Any, list[str]]:
    """The layouts that a run takes, the bytes of the fullest rank and the seconds of each, and its words."""
    found = list[tuple[int, int, float, str]]()
    for at in range(len(columns["data"])):
        try:
            options = search.options_at(columns, at)
            plan = plan_memory(kit_of("text_generation"), options, cluster)
        except ConfigError:
            continue
        time = plan.time(cluster)
        assert time is not None
        found.append((at, plan.memory.peak, time.seconds, words_of(options)))
    numbers, sizes, seconds, words = zip(*found, strict=True)
    return list(numbers), np.array(sizes), np.array(seconds), list(words)


def wrong_order(estimated: Any, true: Any) -> float:
    """The part of the pairs that are apart whose order the estimate turns round."""
    one, two = true[:, None] * APART < true[None], estimated[:, None] >= estimated[None]
    return float((one & two).sum() / max(one.sum(), 1))


def rank_correlation(estimated: Any, true: Any) -> float:
    """Spearman's, with ties in the order in which they stand."""
    one, two = (np.argsort(np.argsort(each, kind="stable"), kind="stable") for each in (estimated, true))
    return float(np.corrcoef(one, two)[0, 1])


def figures(name: str, estimated: Any, true: Any, words: Sequence[str]) -> str:
    ratio = estimated / true
    least, most = words[int(ratio.argmin())], words[int(ratio.argmax())]
    middle = f"{ratio.min():.2f} ({least}) | {np.median(ratio):.2f} | {ratio.max():.2f} ({most})"
    return f"| {name} | {middle} | {rank_correlation(estimated, true):.3f} | {wrong_order(estimated, true):.1%} |"


def main() -> None:
    CommandLine(__doc__).parse(SMOKE, globals())
    options = options_of(CHOICES | {name: each for name, each in GIVEN.items() if name.startswith("trainer.")})
    cluster = ClusterConfig(speed=ASSUMED)
    search = LayoutSearch(kit_of("text_generation"), options, cluster, GIVEN, NUM_RANKS)
    columns, _, sizes, seconds = estimated = search.estimated()
    numbers, true_sizes, true_seconds, words = traced(search, columns, cluster)
    lines = [
        "# The search of layouts beside a trace of each",
        "",
        f"torch {torch.__version__}, {datetime.date.today()}; written by `python -m benchmarks.parallel.layouts`.",
        f"`gpt2_tiny` with 8 rows of 32 tokens on {NUM_RANKS} ranks: {len(numbers)} layouts, each estimated from",
        "probes and traced. Order: pairs that the traces put more than 2 % apart and the estimate the other way round.",
        "",
        "| estimate / trace | least | median | most | rank correlation | pairs in the wrong order |",
        "|---|---|---:|---|---:|---:|",
        figures("memory", sizes[numbers], true_sizes, words),
        figures("time", seconds[numbers], true_seconds, words),
        "",
        f"| devices that fit | layouts that fit | of the {NUM_FOUND} found among the true {NUM_BEST} | first / best |",
        "|---|---:|---:|---:|",
    ]
    where = {each: at for at, each in enumerate(words)}
    for part in PARTS:
        limit = float(np.quantile(true_sizes, part))
        small = ClusterConfig(speed=ASSUMED, memory_gb=(limit + 1) / 2**30, reserve=0.0)
        limited = LayoutSearch(kit_of("text_generation"), options, small, GIVEN, NUM_RANKS)
        best = limited.ordered(*estimated).best
        times = np.sort(true_seconds[true_sizes <= limit])
        own = [float(true_seconds[where[words_of(each.options)]]) for each in best]
        among = sum(each <= times[min(NUM_BEST, len(times)) - 1] for each in own)
        row = f"{limit / 2**20:.2f} MiB | {len(times)} | {among} of {len(best)} | {own[0] / times[0]:.3f}"
        lines.append(f"| {row} |")
    write_result(PAGE, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
