"""`exchange_rows` in one pass: both rows of a pair are asked for ahead, and no row lies in between."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.compiled import compiled, prefetch, share
from kitforge.core.kernels.exchange_rows.reference import require_pairs

# Numbers that are worth a thread.
GRAIN = 2**14
# How many pairs ahead one is asked for: rows lie anywhere, and memory answers late.
AHEAD = 8

Floats = NDArray[Any]
Places = NDArray[np.int64]


def exchange_rows(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
    """See `core.kernels.dispatch.ExchangeRows`."""
    require_pairs(one, other, at, to)
    pairs = (one.numpy(), other.numpy(), at.numpy(), to.numpy())
    share(lambda start, stop: _exchange(*pairs, start, stop), len(at), GRAIN // max(one.shape[1], 1))


@compiled
def _ask(rows: Floats, place: int) -> None:
    for column in range(0, rows.shape[1], 16):
        prefetch(rows, place, column)
    prefetch(rows, place, rows.shape[1] - 1)


@compiled
def _exchange(one: Floats, other: Floats, at: Places, to: Places, start: int, stop: int) -> None:
    for number in range(start, stop):
        if number + AHEAD < stop:
            _ask(one, at[number + AHEAD])
            _ask(other, to[number + AHEAD])
        here, there = one[at[number]], other[to[number]]
        for column in range(one.shape[1]):
            here[column], there[column] = there[column], here[column]
