"""`embedding_bag_backward` in one pass over the ids. Each thread sums the rows it owns, in the order of ids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for, prefetch
from kitforge.core.kernels.cpu_engine.threads import num_threads
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.indexing import check_indices

# Elements per thread, at least.
GRAIN = 2**17
# Prefetch distance in ids: rows are scattered, so memory latency dominates.
AHEAD = 8

Floats = NDArray[Any]
Indices = NDArray[np.int64]


def embedding_bag_backward(
    gradients: Tensor, inverse: Tensor, num_rows: int, *, bags: Bags | None = None, out: Tensor | None = None
) -> Tensor:
    check_indices(inverse, num_rows, "indices of the rows")
    if out is None:
        out = gradients.new_empty(num_rows, gradients.shape[1])
    sums, parts, indices = out.numpy(), gradients.contiguous().numpy(), inverse.numpy()
    num_owners = max(1, min(num_threads(), len(indices) * sums.shape[1] // GRAIN))
    if bags is None:
        parallel_for(lambda *owners: _each(_add, owners, num_owners, parts, indices, sums), num_owners, 1)
        return out
    bags.require(len(indices))
    offsets, is_mean = bags.offsets.numpy(), bags.mode == "mean"
    weights = out.new_empty(0) if bags.weights is None else bags.weights.to(out.dtype)
    weighting = (weights.numpy(), bags.weights is not None)
    given = (parts, indices, offsets, *weighting, is_mean, sums)
    parallel_for(lambda *owners: _each(_add_bags, owners, num_owners, *given), num_owners, 1)
    return out


def _each(loop: Any, owners: tuple[int, int], num_owners: int, *given: Any) -> None:
    """Run the loop for some owners; a thread runs several if fewer threads are free by now."""
    for owner in range(*owners):
        loop(*given, owner, num_owners)


@compiled
def _owner(row: int, num_owners: int) -> Any:
    """The owner of a row, by multiplicative hashing: it spreads neighbours, which are often equally frequent."""
    return ((np.uint64(row) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)) * np.uint64(num_owners)) >> np.uint64(32)


@compiled
def _clear(sums: Floats, owner: int, num_owners: int) -> None:
    for row in range(len(sums)):
        if num_owners == 1 or _owner(row, num_owners) == np.uint64(owner):
            sums[row] = 0


@compiled
def _add(parts: Floats, indices: Indices, sums: Floats, owner: int, num_owners: int) -> None:
    own = np.uint64(owner)
    _clear(sums, owner, num_owners)
    for number in range(len(indices)):
        if number + AHEAD < len(indices):
            prefetch(sums, indices[number + AHEAD], 0)
        row = indices[number]
        if num_owners == 1 or _owner(row, num_owners) == own:
            for column in range(sums.shape[1]):
                sums[row, column] += parts[number, column]


@compiled
def _add_bags(
    parts: Floats,
    indices: Indices,
    offsets: Indices,
    weights: Floats,
    is_weighted: bool,
    is_mean: bool,
    sums: Floats,
    owner: int,
    num_owners: int,
) -> None:
    own, one = np.uint64(owner), sums.dtype.type(1)
    _clear(sums, owner, num_owners)
    for bag in range(len(offsets) - 1):
        count = sums.dtype.type(offsets[bag + 1] - offsets[bag]) if is_mean else one
        for number in range(offsets[bag], offsets[bag + 1]):
            row = indices[number]
            if num_owners > 1 and _owner(row, num_owners) != own:
                continue
            weight = weights[number] if is_weighted else one
            for column in range(sums.shape[1]):
                sums[row, column] += parts[bag, column] / count * weight
