"""`unique` by hashing: each thread numbers a chunk of the ids, then the chunks are merged from front to back.

An id that is new in a later chunk follows all ids of earlier chunks, so the order is that of first occurrence for any
number of chunks.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, hash_bits, parallel_for, prefetch
from kitforge.core.kernels.cpu_engine.threads import num_threads
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.kernels.unique import reference

SMALLEST_TABLE = 64
# Ids per thread, at least.
GRAIN = 2**16
# Prefetch distance in ids.
AHEAD = 16
# Returned instead of a count when a table is full.
FULL = -1

Ids = NDArray[np.int64]
Numbers = NDArray[np.int32]


def unique(ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None) -> tuple[Tensor, Tensor]:
    if len(ids) >= 2**31:
        return reference.unique(ids, out, scratch)
    inverse = torch.empty(len(ids), dtype=torch.int64) if out is None else out
    scratch = scratch or Workspace()
    # Most batches repeat most of their ids: a small table that fits the CPU cache is worth an occasional second try.
    size = max(SMALLEST_TABLE, 1 << (len(ids) // 2).bit_length())
    distinct = scratch.take("unique.distinct", len(ids), dtype=torch.int64)
    while (count := _try(ids.numpy(), distinct.numpy(), inverse.numpy(), size, scratch)) == FULL:
        size *= 2
    return torch.from_numpy(distinct.numpy()[:count].copy()), inverse


def _try(ids: Ids, distinct: Ids, inverse: Ids, size: int, scratch: Workspace) -> int:
    """Write the distinct ids to the front of `distinct`. Returns their number, or FULL if tables are too small."""
    num_chunks = max(1, min(num_threads(), len(ids) // GRAIN))
    bounds = np.arange(num_chunks + 1) * len(ids) // num_chunks
    tables = scratch.take("unique.tables", num_chunks, size, dtype=torch.int32).numpy()

    def number(first: int, last: int) -> list[int]:
        chunks = range(first, last)
        return [_number(ids, tables[each], distinct, inverse, bounds[each], bounds[each + 1]) for each in chunks]

    # A thread may get several chunks, if fewer threads are free by now.
    counts = [count for several in parallel_for(number, num_chunks, 1) for count in several]
    if FULL in counts:
        return FULL
    total: int = counts[0]
    new_numbers = scratch.take("unique.new_numbers", len(ids), dtype=torch.int32).numpy()
    for chunk in range(1, num_chunks):
        total = _merge(tables[0], distinct, total, new_numbers, bounds[chunk], counts[chunk])
        if total == FULL:
            return FULL
    parallel_for(lambda first, last: _renumber(new_numbers, inverse, bounds, max(first, 1), last), num_chunks, 1)
    return total


@compiled
def _probe(table: Numbers, distinct: Ids, key: Any) -> Any:
    """The position of an id in the table, which holds its number from 1 on, or of the 0 of a new id."""
    mask = len(table) - 1
    position = np.int64(hash_bits(key) & np.uint64(mask))
    while table[position] != 0 and distinct[table[position] - 1] != key:
        position = (position + 1) & mask
    return position


@compiled
def _number(ids: Ids, table: Numbers, distinct: Ids, inverse: Ids, start: int, stop: int) -> int:
    """Number the ids of one chunk; its distinct ids are written from `start` on."""
    # It probes by itself, as `_probe` does: a call with arrays would count their references by atomic operations.
    count, room, mask = 0, len(table) // 4 * 3, np.uint64(len(table) - 1)
    table[:] = 0
    rows = table.reshape(-1, 1)
    for index in range(start, stop):
        if index + AHEAD < stop:
            prefetch(rows, np.int64(hash_bits(ids[index + AHEAD]) & mask), 0)
        key = ids[index]
        entry = hash_bits(key) & mask
        while table[entry] != 0 and distinct[start + table[entry] - 1] != key:
            entry = (entry + np.uint64(1)) & mask
        if table[entry] == 0:
            if count == room:
                return FULL
            distinct[start + count] = key
            count += 1
            table[entry] = count
        inverse[index] = table[entry] - 1
    return count


@compiled
def _merge(table: Numbers, distinct: Ids, count: int, new_numbers: Numbers, start: int, num_others: int) -> int:
    """Append the new ids of a later chunk, and write the numbers of all its ids."""
    room = len(table) // 4 * 3
    for other in range(start, start + num_others):
        key = distinct[other]
        entry = _probe(table, distinct, key)
        if table[entry] == 0:
            if count == room:
                return FULL
            distinct[count] = key
            count += 1
            table[entry] = count
        new_numbers[other] = table[entry] - 1
    return count


@compiled
def _renumber(new_numbers: Numbers, inverse: Ids, bounds: Ids, first: int, last: int) -> None:
    for chunk in range(first, last):
        for index in range(bounds[chunk], bounds[chunk + 1]):
            inverse[index] = new_numbers[bounds[chunk] + inverse[index]]
