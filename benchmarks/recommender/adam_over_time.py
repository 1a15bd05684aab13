"""What a step of Adam over rows costs as the steps go by.

Run from the checkout: `python -m benchmarks.recommender.adam_over_time`; it prints the rows of a table for
benchmarks/recommender/adam_over_time.md. A step moves 4,096 rows of 16 numbers in one thread; the lookup is of a table
with dense Adam whose 1,000 rows have all been told of every step. Each figure is the least of seven, in CPU time.
"""

import time
from collections.abc import Callable

import torch

from benchmarks.command_line import CommandLine
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName, build_row_optimizer
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.log import logger

_log = logger(__name__)
DIM, NUM_ROWS, NUM_LOOKED_UP, REPEATS = 16, 4096, 1000, 7
NAMES: tuple[SparseOptimizerName, ...] = ("adagrad", "lazy_adam", "adam")
STEPS = (10, 10_000, 100_000, 1_000_000, 10_000_000)
SMOKE = {"NUM_ROWS": 8, "NUM_LOOKED_UP": 8, "REPEATS": 1, "STEPS": (10, 100)}


def milliseconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def step_time(name: SparseOptimizerName, step: int) -> float:
    """The time of one step with that number, of rows that have had as many."""
    rule = build_row_optimizer(SparseOptimizerConfig(name=name))
    slots, layout = torch.arange(NUM_ROWS), rule.layout(DIM)
    slab = torch.zeros(NUM_ROWS, layout.width)
    rule.init_states_(slab, layout)
    gradients, counters = torch.ones(NUM_ROWS, DIM), layout.as_integers(slab)

    def move() -> None:
        counters[:, layout.updates] = counters[:, layout.last_step] = step - 1
        if layout.moments_step is not None:
            counters[:, layout.moments_step] = step - 1
        rule.update(slab, slots, gradients, 1e-3, step)

    move()
    return milliseconds(move)


def lookup_time(step: int) -> float:
    """The time of one lookup with dense Adam after that many steps."""
    with CachedEmbedding(None, DIM, optimizer="adam") as table, torch.no_grad():
        ids = torch.arange(NUM_LOOKED_UP).unsqueeze(1)
        with torch.enable_grad():
            table(ids).sum().backward()
        table.step(0.01)
        table.rows.num_steps = step
        table.rows.rates = torch.full((step + 8,), 0.01, dtype=torch.float64)
        table(ids)
        return milliseconds(lambda: table(ids))


def main() -> None:
    """Log one line of the table for each number of steps."""
    CommandLine(__doc__).parse(SMOKE, globals())
    torch.set_num_threads(1)
    for step in STEPS:
        times = (*(step_time(name, step) for name in NAMES), lookup_time(step))
        _log.warning("| %s | %s |", f"{step:,}", " | ".join(f"{each:.2f}" for each in times))


if __name__ == "__main__":
    main()
