"""`embedding_bag` in one pass from the slab to the output; rows of a bag are never materialized.

Where many ids share few rows, the distinct rows are first gathered into a buffer that stays in the CPU cache.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for, prefetch_row
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.core.kernels.tables.workspace import Workspace

# Elements per thread, at least.
GRAIN = 2**16
# Prefetch distance in ids: rows are scattered, so memory latency dominates.
AHEAD = 32
# Distinct rows of at most so many bytes stay in the CPU cache.
CACHED_BYTES = 2**24

Floats = NDArray[Any]
Indices = NDArray[np.int64]
NO_INDICES = np.empty(0, np.int64)


def embedding_bag(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    *,
    inverse: Tensor | None = None,
    bags: Bags | None = None,
    out: Tensor | None = None,
    scratch: Workspace | None = None,
) -> Tensor:
    num_ids = len(slots if inverse is None else inverse)
    check_indices(slots, len(slab), "slots of the slab")
    if inverse is not None:
        check_indices(inverse, len(slots), "indices of the slots")
    if out is None:
        out = slab.new_empty(num_ids if bags is None else bags.num_bags, dim)
    target, grain = out.numpy(), GRAIN // max(dim, 1)
    if inverse is not None and num_ids >= 2 * len(slots) and len(slots) * dim * slab.element_size() <= CACHED_BYTES:
        near = (scratch or Workspace()).take("embedding_bag.near", len(slots), dim, dtype=slab.dtype).numpy()
        fetched = (slab.numpy(), slots.numpy(), NO_INDICES, True, dim, near)
        parallel_for(lambda start, stop: _gather(*fetched, start, stop), len(slots), grain)
        source = (near, inverse.numpy(), NO_INDICES, True, dim)
    else:
        indices = NO_INDICES if inverse is None else inverse.numpy()
        source = (slab.numpy(), slots.numpy(), indices, inverse is None, dim)
    if bags is None:
        parallel_for(lambda start, stop: _gather(*source, target, start, stop), num_ids, grain)
        return out
    bags.require(num_ids)
    offsets, is_mean = bags.offsets.numpy(), bags.mode == "mean"
    weights = out.new_empty(0) if bags.weights is None else bags.weights.to(out.dtype)
    weighting = (weights.numpy(), bags.weights is not None)
    parallel_for(
        lambda start, stop: _pool(*source, offsets, *weighting, is_mean, target, start, stop),
        bags.num_bags,
        grain * bags.num_bags // max(num_ids, 1),
    )
    return out


@compiled
def _gather(
    slab: Floats, slots: Indices, inverse: Indices, is_direct: bool, dim: int, out: Floats, start: int, stop: int
) -> None:
    for number in range(start, stop):
        later = number + AHEAD
        if later < stop:
            prefetch_row(slab, slots[later] if is_direct else slots[inverse[later]], dim)
        slot = slots[number] if is_direct else slots[inverse[number]]
        for column in range(dim):
            out[number, column] = slab[slot, column]


@compiled
def _pool(
    slab: Floats,
    slots: Indices,
    inverse: Indices,
    is_direct: bool,
    dim: int,
    offsets: Indices,
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
            later = number + AHEAD
            if later < offsets[stop]:
                prefetch_row(slab, slots[later] if is_direct else slots[inverse[later]], dim)
            slot = slots[number] if is_direct else slots[inverse[number]]
            # Multiplying by one changes no bit.
            weight = weights[number] if is_weighted else one
            for column in range(dim):
                out[bag, column] += slab[slot, column] * weight
        if is_mean and last > first + 1:
            count = out.dtype.type(last - first)
            for column in range(dim):
                out[bag, column] /= count
