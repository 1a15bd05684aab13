"""`gather_pool` from rows that are near: where many ids share few rows, those are fetched once and stay in the cache.

Otherwise rows go from the slab to the output in one pass. Rows of a bag are never laid out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.bags import Bags
from kitforge.core.kernels.compiled import compiled, prefetch, share
from kitforge.core.kernels.places import require
from kitforge.core.kernels.scratch import Scratch

# Numbers that are worth a thread.
GRAIN = 2**16
# How many ids ahead a row is asked for: rows lie anywhere, and memory answers late.
AHEAD = 32
# Distinct rows of so many bytes stay in the cache while they are handed out.
NEAR = 2**24

Floats = NDArray[Any]
Places = NDArray[np.int64]
NO_PLACES = np.empty(0, np.int64)


def gather_pool(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    *,
    inverse: Tensor | None = None,
    bags: Bags | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `core.kernels.dispatch.GatherPool`."""
    num_ids = len(slots if inverse is None else inverse)
    require(slots, len(slab), "slots of the slab")
    if inverse is not None:
        require(inverse, len(slots), "places among the slots")
    if out is None:
        out = slab.new_empty(num_ids if bags is None else bags.num_bags, dim)
    target, grain = out.numpy(), GRAIN // max(dim, 1)
    if inverse is not None and num_ids >= 2 * len(slots) and len(slots) * dim * slab.element_size() <= NEAR:
        near = (scratch or Scratch()).take("gather_pool.near", len(slots), dim, dtype=slab.dtype).numpy()
        fetched = (slab.numpy(), slots.numpy(), NO_PLACES, True, dim, near)
        share(lambda start, stop: _gather(*fetched, start, stop), len(slots), grain)
        source = (near, inverse.numpy(), NO_PLACES, True, dim)
    else:
        places = NO_PLACES if inverse is None else inverse.numpy()
        source = (slab.numpy(), slots.numpy(), places, inverse is None, dim)
    if bags is None:
        share(lambda start, stop: _gather(*source, target, start, stop), num_ids, grain)
        return out
    bags.require(num_ids)
    offsets, is_mean = bags.offsets.numpy(), bags.mode == "mean"
    weights = out.new_empty(0) if bags.weights is None else bags.weights.to(out.dtype)
    weighting = (weights.numpy(), bags.weights is not None)
    share(
        lambda start, stop: _pool(*source, offsets, *weighting, is_mean, target, start, stop),
        bags.num_bags,
        grain * bags.num_bags // max(num_ids, 1),
    )
    return out


@compiled
def _ask(slab: Floats, slots: Places, inverse: Places, is_direct: bool, dim: int, number: int) -> None:
    """Ask for the row of an id that comes later."""
    slot = slots[number] if is_direct else slots[inverse[number]]
    for column in range(0, dim, 16):
        prefetch(slab, slot, column)
    prefetch(slab, slot, dim - 1)


@compiled
def _gather(
    slab: Floats,
    slots: Places,
    inverse: Places,
    is_direct: bool,
    dim: int,
    out: Floats,
    start: int,
    stop: int,
) -> None:
    for number in range(start, stop):
        if number + AHEAD < stop:
            _ask(slab, slots, inverse, is_direct, dim, number + AHEAD)
        slot = slots[number] if is_direct else slots[inverse[number]]
        for column in range(dim):
            out[number, column] = slab[slot, column]


@compiled
def _pool(
    slab: Floats,
    slots: Places,
    inverse: Places,
    is_direct: bool,
    dim: int,
    offsets: Places,
    weights: Floats,
    is_weighted: bool,
    is_mean: bool,
    out: Floats,
    start: int,
    stop: int,
) -> None:
    one = out.dtype.type(1)
    for bag in range(start, stop):
        first, last = offsets[bag], offsets[bag + 1]
        for column in range(dim):
            out[bag, column] = 0
        for number in range(first, last):
            if number + AHEAD < offsets[stop]:
                _ask(slab, slots, inverse, is_direct, dim, number + AHEAD)
            slot = slots[number] if is_direct else slots[inverse[number]]
            # A product with one changes no bit.
            weight = weights[number] if is_weighted else one
            for column in range(dim):
                out[bag, column] += slab[slot, column] * weight
        if is_mean and last > first + 1:
            count = out.dtype.type(last - first)
            for column in range(dim):
                out[bag, column] /= count
