"""Gathering of whole tensors and sharding again, for optimizer updates that are not elementwise."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh


def gather_full_tensor(shard: Tensor | None, layout: Layout, mesh: Mesh, dtype: torch.dtype | None = None) -> Tensor:
    """All-gather a tensor of that layout on every rank. A rank of a stage that does not have it gives None, and its
    dtype."""
    whole = None if shard is None else _gather_shards(shard, layout, mesh)
    if layout.stages is None or len(layout.stages) == mesh.degree("pipeline"):
        assert whole is not None
        return whole
    device = torch.device(mesh.device_mesh.device_type)
    whole = torch.empty(layout.shape, dtype=dtype, device=device) if whole is None else whole.contiguous()
    group = mesh.group("pipeline")
    assert group is not None
    collectives.broadcast_([whole], group, layout.stages[0])
    return whole


def _gather_shards(shard: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor on the ranks that hold a shard of it."""
    for number in reversed(range(len(layout.splits))):
        split = layout.splits[number]
        size = replace(layout, splits=layout.splits[:number]).held_region(mesh.index).shape[split.dim]
        missing = -(-size // split.degree) - shard.shape[split.dim]
        # Pieces are sent at one size; `pad` counts dims from the last.
        padded = functional.pad(shard, (0, 0) * (shard.dim() - 1 - split.dim) + (0, missing))
        shard = collectives.all_gather(padded, mesh.group(split.axis), split.dim).narrow(split.dim, 0, size)
    return shard


class FullMatrices:
    """Matrices by the pieces that are this rank's parameters; see `core.optim.muon.Matrices`."""

    def __init__(self, layouts: Mapping[Tensor, Layout], mesh: Mesh) -> None:
        self._layouts = layouts
        self._mesh = mesh

    def full_shape(self, shard: Tensor) -> tuple[int, ...]:
        """The global shape of a parameter."""
        return self._layouts[shard].shape

    def full_tensor(self, value: Tensor, shard: Tensor) -> Tensor:
        """The whole matrix of the shards `value` of the ranks of this stage; those of others are at other matrices."""
        return _gather_shards(value, self._layouts[shard], self._mesh)

    def shard_of(self, matrix: Tensor, shard: Tensor) -> Tensor:
        """This rank's shard of a whole matrix."""
        return self._layouts[shard].held_region(self._mesh.index).of(matrix)
