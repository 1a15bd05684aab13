"""What an incremental checkpoint costs: rows of the file tier that it reads, CPU time, and bytes.

Run from the checkout: `python -m benchmarks.recommender.deltas`; it prints the rows of the table of
benchmarks/recommender/deltas.md. 1,000 rows of a table in the file tier change between two checkpoints, in one thread.
"""

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.embedding_cache.tiers.file import FileStore
from kitforge.foundation.log import logger

_log = logger(__name__)
DIM, NUM_CHANGED, IN_MEMORY = 16, 1000, 20_000
SIZES = (100_000, 400_000, 1_600_000)
SMOKE = {"SIZES": (40_000,)}
NUM_READ = [0]


def count_reads() -> None:
    """Count the rows that the file tier is asked for."""
    read = FileStore.read

    def counted(store: FileStore, keys: Tensor, out: Tensor) -> Tensor:
        NUM_READ[0] += len(keys)
        return read(store, keys, out)

    FileStore.read = counted  # type: ignore[method-assign, assignment]


def train(table: CachedEmbedding, ids: Tensor) -> None:
    table(ids.unsqueeze(1)).sum().backward()
    table.step(0.1)


def measure(folder: Path, num_rows: int) -> tuple[int, float, float]:
    """Rows read, CPU seconds and KiB of a delta."""
    tiers: dict[str, Any] = {"device_rows": IN_MEMORY, "host_rows": IN_MEMORY, "path": str(folder / "tier")}
    with CachedEmbedding(None, DIM, optimizer="adagrad", **tiers) as table:
        for first in range(0, num_rows, 10_000):
            train(table, torch.arange(first, first + 10_000))
        with closing(CheckpointWriter(folder / "checkpoints")) as writer:
            writer.attach({"table": table}, num_deltas=1)
            writer.save(1, model=[], optimizer=[], state={})
            writer.wait()
            train(table, torch.arange(NUM_CHANGED))
            NUM_READ[0], start = 0, time.process_time()
            writer.save(2, model=[], optimizer=[], state={})
        seconds = time.process_time() - start
    size = sum(file.stat().st_size for file in (folder / "checkpoints" / "step_2").iterdir())
    return NUM_READ[0], seconds, size / 2**10


def main() -> None:
    """Log one line of the table for each size."""
    CommandLine(__doc__).parse(SMOKE, globals())
    torch.set_num_threads(1)
    count_reads()
    for num_rows in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            num_read, seconds, size = measure(Path(folder), num_rows)
        _log.warning("| %s | %s | %.2f | %.0f |", f"{num_rows:,}", f"{num_read:,}", seconds, size)


if __name__ == "__main__":
    main()
