"""Gathering of whole tensors on the CPU of rank 0, one at a time, for export."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from kitforge.core.parallel import collectives
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.parallelize import ParallelModel


class GatheredParameters(Mapping[str, Tensor]):
    """The parameters of a model, matrices in one dtype and vectors in fp32, each put together when rank 0 asks for it,
    in the order of `names`.

    All ranks make it. Rank 0 reads it and the others give their pieces by `finish`; they hold nothing but these. Alone,
    a parameter is its own memory where it has its dtype.
    """

    def __init__(self, parallel: ParallelModel, names: Sequence[str], dtype: torch.dtype) -> None:
        self._shards = parallel.parameters()
        self._layouts = parallel.layouts
        self._device = parallel.device
        self._rank = parallel.rank
        self._grid = None if parallel.mesh is None else parallel.mesh.grid
        self._names = list(names)
        self._dtype = dtype
        self._num_given = 0

    def __getitem__(self, name: str) -> Tensor:
        if self._grid is None:
            return self._shards[name].detach().to(self._dtype_of(self._shards[name].shape))
        expected = self._names[self._num_given]
        assert name == expected, f"{name} is asked for in the place of {expected}"
        found = self._next_tensor(self._grid)
        assert found is not None
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def finish(self) -> None:
        """Send or receive the remaining tensors, so that no rank waits. All ranks call it, also after errors."""
        while self._grid is not None and self._num_given < len(self._names):
            self._next_tensor(self._grid)

    @torch.no_grad()
    def _next_tensor(self, grid: Grid) -> Tensor | None:
        name = self._names[self._num_given]
        self._num_given += 1
        held = self._shards.get(name)
        shard = torch.empty(0, device=self._device) if held is None else held.detach()
        dtype = self._dtype_of(self._layouts[name].shape)
        return gather_to_rank_zero(shard.to(dtype), self._layouts[name], grid, self._rank)

    def _dtype_of(self, shape: Sequence[int]) -> torch.dtype:
        """Vectors are few, and some are stored as the difference from one, which is rounded after it is taken."""
        return torch.float32 if len(shape) == 1 else self._dtype


def gather_to_rank_zero(shard: Tensor, layout: Layout, grid: Grid, rank: int) -> Tensor | None:
    """The whole tensor on the CPU of rank 0, gathered from the shards of all ranks; None on the others.

    All ranks call it together, those without a shard with an empty tensor. Beside the whole, rank 0 holds one piece at
    a time.
    """
    whole = torch.empty(layout.shape, dtype=shard.dtype) if rank == 0 else None
    for each in grid.shards(layout):
        sender = each.holders[0]
        if rank == sender != 0:
            collectives.send(shard.contiguous(), 0)
        if whole is None:
            continue
        if sender == 0:
            part = shard
        else:
            part = collectives.receive_(torch.empty(each.region.shape, dtype=shard.dtype, device=shard.device), sender)
        each.region.of(whole).copy_(part)
    return whole
