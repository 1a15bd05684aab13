"""`hash_map` by open addressing with linear probing: key and slot are adjacent, so a lookup reads one cache line.

Removal shifts the following keys back, so there are no tombstones and churn does not slow the map down.

The loops over many keys probe by themselves, as `_probe` does: a call with an array counts its references by atomic
operations, which took two thirds of the time. Their positions are unsigned, so that no index may be negative.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, hash_bits, parallel_for, prefetch
from kitforge.core.kernels.hash_map.reference import FoundIds, found_among
from kitforge.core.kernels.unique.numba import unique

# The slot of a free position; a key can be any number.
FREE = -1
SMALLEST_TABLE = 64
# Keys per thread, at least.
GRAIN = 2**13
# Prefetch distance in keys: memory latency dominates.
AHEAD = 16

Table = NDArray[np.int64]
Keys = NDArray[np.int64]


class OpenAddressingHashMap:
    """See `HashMapKernel`."""

    def __init__(self, room: int = 0) -> None:
        self._num_keys = 0
        self._table = _empty(room)

    def __len__(self) -> int:
        return self._num_keys

    def lookup(self, keys: Tensor, marks: Tensor | None = None, mark: int = 0) -> Tensor:
        """See the protocol."""
        result = torch.empty(len(keys), dtype=torch.int64)
        table, wanted, slots = self._table, keys.numpy(), result.numpy()
        if marks is None:
            parallel_for(lambda start, stop: _lookup(table, wanted, slots, start, stop), len(wanted), GRAIN)
        else:
            marked = marks.numpy()
            parallel_for(
                lambda start, stop: _lookup_and_mark(table, wanted, slots, marked, mark, start, stop),
                len(wanted),
                GRAIN,
            )
        return result

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See the protocol."""
        if len(self._table) < _size(self._num_keys + len(keys)):
            table = _empty(self._num_keys + len(keys))
            _rehash(self._table, table)
            self._table = table
        before = torch.empty(len(keys), dtype=torch.int64)
        self._num_keys += _insert(self._table, keys.numpy(), slots.numpy(), before.numpy())
        return before

    def replace(self, keys: Tensor, slots: Tensor) -> None:
        """See the protocol."""
        table, wanted, given = self._table, keys.numpy(), slots.numpy()
        # No key moves, so threads do not disturb one another.
        parallel_for(lambda start, stop: _replace(table, wanted, given, start, stop), len(wanted), GRAIN)

    def remove(self, keys: Tensor) -> Tensor:
        """See the protocol."""
        slots = torch.empty(len(keys), dtype=torch.int64)
        self._num_keys -= _remove(self._table, keys.numpy(), slots.numpy())
        return slots

    def items(self) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        occupied = torch.from_numpy(self._table[self._table[:, 1] != FREE])
        order = torch.argsort(occupied[:, 0])
        return occupied[order, 0], occupied[order, 1]

    def find_distinct(self, ids: Tensor, bound: int | None = None) -> FoundIds:
        """See the protocol."""
        return found_among(self, *unique(ids), bound)


def _size(num_keys: int) -> int:
    """The size of a table, a power of two, with a load factor of at most 3/4."""
    return max(SMALLEST_TABLE, 1 << (num_keys + num_keys // 3).bit_length())


def _empty(room: int) -> Table:
    table = np.empty((_size(room), 2), np.int64)
    table[:, 1] = FREE
    return table


@compiled
def _home(key: Any, mask: Any) -> Any:
    """The first position that is probed for a key, unsigned."""
    return hash_bits(key) & np.uint64(mask)


@compiled
def _probe(table: Table, key: Any) -> Any:
    """The position of the key, or the free position for it."""
    mask = np.uint64(len(table) - 1)
    position = _home(key, mask)
    while table[position, 1] != FREE and table[position, 0] != key:
        position = (position + np.uint64(1)) & mask
    return np.int64(position)


@compiled
def _lookup(table: Table, keys: Keys, slots: Keys, start: int, stop: int) -> None:
    mask = np.uint64(len(table) - 1)
    for number in range(start, stop):
        if number + AHEAD < stop:
            prefetch(table, np.int64(_home(keys[number + AHEAD], mask)), 0)
        key = keys[number]
        position = _home(key, mask)
        while table[position, 1] != FREE and table[position, 0] != key:
            position = (position + np.uint64(1)) & mask
        slots[number] = table[position, 1]


@compiled
def _lookup_and_mark(table: Table, keys: Keys, slots: Keys, marks: Keys, mark: int, start: int, stop: int) -> None:
    mask = np.uint64(len(table) - 1)
    for number in range(start, stop):
        if number + AHEAD < stop:
            prefetch(table, np.int64(_home(keys[number + AHEAD], mask)), 0)
        key = keys[number]
        position = _home(key, mask)
        while table[position, 1] != FREE and table[position, 0] != key:
            position = (position + np.uint64(1)) & mask
        slots[number] = table[position, 1]
        if slots[number] >= 0:
            marks[slots[number]] = mark


@compiled
def _replace(table: Table, keys: Keys, slots: Keys, start: int, stop: int) -> None:
    mask = np.uint64(len(table) - 1)
    for number in range(start, stop):
        if number + AHEAD < stop:
            prefetch(table, np.int64(_home(keys[number + AHEAD], mask)), 0)
        key = keys[number]
        position = _home(key, mask)
        while table[position, 1] != FREE and table[position, 0] != key:
            position = (position + np.uint64(1)) & mask
        table[position, 1] = slots[number]


@compiled
def _insert(table: Table, keys: Keys, slots: Keys, before: Keys) -> int:
    num_new, mask = 0, np.uint64(len(table) - 1)
    for number in range(len(keys)):
        if number + AHEAD < len(keys):
            prefetch(table, np.int64(_home(keys[number + AHEAD], mask)), 0)
        key = keys[number]
        position = _home(key, mask)
        while table[position, 1] != FREE and table[position, 0] != key:
            position = (position + np.uint64(1)) & mask
        before[number] = table[position, 1]
        if table[position, 1] == FREE:
            num_new += 1
        table[position, 0] = key
        table[position, 1] = slots[number]
    return num_new


@compiled
def _rehash(old: Table, new: Table) -> None:
    for number in range(len(old)):
        if old[number, 1] != FREE:
            position = _probe(new, old[number, 0])
            new[position, 0] = old[number, 0]
            new[position, 1] = old[number, 1]


@compiled
def _remove(table: Table, keys: Keys, slots: Keys) -> int:
    num_removed, mask = 0, np.uint64(len(table) - 1)
    for number in range(len(keys)):
        if number + AHEAD < len(keys):
            prefetch(table, np.int64(_home(keys[number + AHEAD], mask)), 0)
        position = _probe(table, keys[number])
        slots[number] = table[position, 1]
        if table[position, 1] != FREE:
            num_removed += 1
            _close(table, position)
    return num_removed


@compiled
def _close(table: Table, gap: int) -> None:
    """Free a position and shift back the keys that probing would miss (Knuth, volume 3, algorithm 6.4R)."""
    mask = len(table) - 1
    position = (gap + 1) & mask
    while table[position, 1] != FREE:
        home = np.int64(_home(table[position, 0], mask))
        # A key may move unless its home lies cyclically between the gap and its position.
        if ((position - home) & mask) >= ((position - gap) & mask):
            table[gap, 0] = table[position, 0]
            table[gap, 1] = table[position, 1]
            gap = position
        position = (position + 1) & mask
    table[gap, 1] = FREE
