"""What it costs to let old rows of a table go: CPU time of the steps at which rows expire.

Run from the checkout: `python -m benchmarks.recommender.expiry`; it prints the rows of the table of
benchmarks/recommender/expiry.md. 1,000 rows of a table in the file tier are due, in one thread; all others are younger.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine
from kitforge.embedding_cache.options import ExpiryOptions
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.log import logger

_log = logger(__name__)
DIM, NUM_DUE, BATCH, IN_MEMORY = 16, 1000, 10_000, 20_000
SIZES = (100_000, 400_000, 1_600_000)
SMOKE = {"SIZES": (40_000,)}


def train(table: CachedEmbedding, ids: Tensor) -> None:
    table(ids.unsqueeze(1)).sum().backward()
    table.step(0.1)


def measure(folder: Path, num_rows: int) -> tuple[float, int]:
    """CPU seconds of the step after which the first 1,000 rows of so many are too old, and how many went."""
    starts = range(NUM_DUE, num_rows, BATCH)
    rule = ExpiryOptions(every=len(starts) + 2, max_age=len(starts))
    tiers: dict[str, Any] = {"device_rows": IN_MEMORY, "host_rows": IN_MEMORY, "path": str(folder / "tier")}
    with CachedEmbedding(None, DIM, optimizer="adagrad", expiry=rule, **tiers) as table:
        train(table, torch.arange(NUM_DUE))
        for first in starts:
            train(table, torch.arange(first, min(first + BATCH, num_rows)))
        start = time.process_time()
        train(table, torch.arange(num_rows - 10, num_rows))
        return time.process_time() - start, table.stats().expired


def main() -> None:
    """Log one line of the table for each size."""
    CommandLine(__doc__).parse(SMOKE, globals())
    torch.set_num_threads(1)
    for num_rows in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            seconds, num_gone = measure(Path(folder), num_rows)
        _log.warning("| %s | %s | %.3f |", f"{num_rows:,}", f"{num_gone:,}", seconds)


if __name__ == "__main__":
    main()
