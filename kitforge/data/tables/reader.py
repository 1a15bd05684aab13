"""Reading of tables: several threads parse chunks to numbers and keys; the order of chunks is kept."""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from kitforge.data.tables.arrow_to_columns import to_columns
from kitforge.data.tables.bad_rows import BadRow, BadRows
from kitforge.data.tables.columns import ColumnLayout, Columns, concatenate
from kitforge.data.tables.part import Job
from kitforge.data.tables.source import TableSource
from kitforge.foundation.errors import DataError

_MAX_WORKERS = 4


def read_columns(
    source: TableSource, layout: ColumnLayout, bad: BadRows, num_workers: int | None = None, start: int = 0
) -> Iterator[Columns]:
    """The valid rows of each chunk from chunk `start` on, in order; a few chunks are in memory.

    Chunks before `start` are not parsed and must have valid rows only. Raises DataError by the policy for invalid rows,
    for a file that has changed since it was opened, and for a table without rows. `num_workers` threads parse; None:
    one per core, at most four.
    """
    is_empty = start == 0
    # Finished chunks are yielded without waiting for chunks in progress.
    count = 1 if source.is_once else num_workers or min(os.cpu_count() or 1, _MAX_WORKERS)
    for columns, rows in _in_order(islice(source.jobs(layout.names), start, None), layout, count):
        bad.handle(rows)
        is_empty = is_empty and len(columns) == 0
        yield columns
    source.check_unchanged()
    if is_empty:
        left_out = f", {bad.total} bad ones left out" if bad.total else ""
        raise DataError(f"there are no rows in {source.name}", got=f"no rows{left_out}", expected="at least one")


def _in_order(jobs: Iterator[Job], layout: ColumnLayout, count: int) -> Iterator[tuple[Columns, list[BadRow]]]:
    if count == 1:
        yield from (to_columns(job(), layout) for job in jobs)
        return
    waiting: deque[Future[tuple[Columns, list[BadRow]]]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="tables") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(lambda each: to_columns(each(), layout), job))
                if len(waiting) > count:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def blocks(parts: Iterator[Columns], size: int) -> Iterator[Columns]:
    """Blocks of `size` rows; the last one may be smaller."""
    held: list[Columns] = []
    num_held = 0
    for part in parts:
        held.append(part)
        num_held += len(part)
        if num_held < size:
            continue
        rows = concatenate(held)
        for begin in range(0, num_held - size + 1, size):
            yield rows.take(np.arange(begin, begin + size))
        held = [rows.take(np.arange(num_held - num_held % size, num_held))]
        num_held %= size
    if num_held:
        yield concatenate(held)
