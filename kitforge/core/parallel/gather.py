"""Gathering of whole tensors and sharding again, for optimizer updates that are not elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor
from torch.nn import functional

from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh


def gather_full_tensor(shard: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """All-gather a tensor of that layout on every rank."""
    for number in reversed(range(len(layout.splits))):
        split = layout.splits[number]
        size = Layout(shape=layout.shape, splits=layout.splits[:number]).region(mesh.index).shape[split.dim]
        missing = -(-size // split.degree) - shard.shape[split.dim]
        # Pieces are sent at one size; `pad` counts dims from the last.
        padded = functional.pad(shard, (0, 0) * (shard.dim() - 1 - split.dim) + (0, missing))
        shard = collectives.all_gather(padded, mesh.group(split.axis), split.dim).narrow(split.dim, 0, size)
    return shard


@final
class FullMatrices:
    """Matrices by the pieces that are this rank's parameters; see `core.optim.muon.Matrices`."""

    def __init__(self, layouts: Mapping[Tensor, Layout], mesh: Mesh) -> None:
        self._layouts = layouts
        self._mesh = mesh

    def full_shape(self, shard: Tensor) -> tuple[int, ...]:
        """The global shape of a parameter."""
        return self._layouts[shard].shape

    def full_tensor(self, value: Tensor, shard: Tensor) -> Tensor:
        """The whole matrix of the shards `value` of all ranks."""
        return gather_full_tensor(value, self._layouts[shard], self._mesh)

    def shard_of(self, matrix: Tensor, shard: Tensor) -> Tensor:
        """This rank's shard of a whole matrix."""
        return self._layouts[shard].region(self._mesh.index).of(matrix)
