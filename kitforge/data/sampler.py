"""The order in which a run sees its rows: a pure function of (seed, epoch, index). Knows no data and no ranks."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.foundation.seed import key

_ROUNDS = 8
# A call for a few rows costs as much as one for a block, so blocks are made whole and the last ones kept.
_BLOCK_ROWS = 4096


def shuffled_indices(seed: int, num_rows: int, start: int, count: int, *, shuffle: bool = True) -> NDArray[np.int64]:
    """Row indices [count] of the samples start .. start + count - 1, counted over all epochs.

    Every epoch visits every row once; epochs differ when they are shuffled. Memory and time are O(count).
    """
    samples = np.arange(start, start + count, dtype=np.int64)
    if not shuffle:
        return samples % num_rows
    rows = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, index = divmod(start + filled, num_rows)
        block, position = divmod(index, _BLOCK_ROWS)
        indices = _block(seed, num_rows, epoch, block)[position : position + count - filled]
        rows[filled : filled + len(indices)] = indices
        filled += len(indices)
    return rows


@lru_cache(maxsize=8)
def _block(seed: int, num_rows: int, epoch: int, block: int) -> NDArray[np.int64]:
    """The rows of one block of an epoch. A number that the network sends beyond the rows is sent on (cycle walking)."""
    keys = [key(seed, "order", epoch, round_) for round_ in range(_ROUNDS)]
    first = block * _BLOCK_ROWS
    positions = np.arange(first, min(first + _BLOCK_ROWS, num_rows), dtype=np.uint64)
    rows = _feistel(positions, num_rows, keys)
    while len(outside := np.flatnonzero(rows >= num_rows)):
        rows[outside] = _feistel(rows[outside], num_rows, keys)
    return rows.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], num_rows: int, keys: list[int]) -> NDArray[np.uint64]:
    """A keyed bijection of 0 .. width * height - 1, the smallest such near-square with room for `num_rows`.

    An unbalanced Feistel network over remainders (Black and Rogaway 2002, generalised): each round adds to one half
    a keyed function of the other.
    """
    width = math.isqrt(num_rows - 1) + 1
    height = -(-num_rows // width)
    left, right = numbers // np.uint64(height), numbers % np.uint64(height)
    for round_, key_ in enumerate(keys):
        if round_ % 2 == 0:
            left = (left + hash_array(right, key_) % np.uint64(width)) % np.uint64(width)
        else:
            right = (right + hash_array(left, key_) % np.uint64(height)) % np.uint64(height)
    return left * np.uint64(height) + right
