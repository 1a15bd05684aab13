"""Whole tensors out of their pieces and back, for updates that are not elementwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor
from torch.nn import functional

from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh


def gather_whole(piece: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The whole tensor, on every rank, of which each rank holds the piece that the layout says."""
    for place in reversed(range(len(layout.splits))):
        split = layout.splits[place]
        size = Layout(shape=layout.shape, splits=layout.splits[:place]).region(mesh.index).shape[split.dim]
        missing = -(-size // split.degree) - piece.shape[split.dim]
        # Pieces are sent at one size; `pad` counts dims from the last.
        padded = functional.pad(piece, (0, 0) * (piece.dim() - 1 - split.dim) + (0, missing))
        piece = collectives.all_gather(padded, mesh.group(split.axis), split.dim).narrow(split.dim, 0, size)
    return piece


@final
class WholeMatrices:
    """Matrices by the pieces that are this rank's parameters; see `core.optim.muon.Matrices`."""

    def __init__(self, layouts: Mapping[Tensor, Layout], mesh: Mesh) -> None:
        self._layouts = layouts
        self._mesh = mesh

    def shape(self, piece: Tensor) -> tuple[int, ...]:
        """The shape of the whole that a parameter is a piece of."""
        return self._layouts[piece].shape

    def whole(self, value: Tensor, piece: Tensor) -> Tensor:
        """The whole matrix of which each rank has the `value` that belongs to its piece."""
        return gather_whole(value, self._layouts[piece], self._mesh)

    def part(self, matrix: Tensor, piece: Tensor) -> Tensor:
        """This rank's part of a whole matrix."""
        return self._layouts[piece].region(self._mesh.index).of(matrix)
