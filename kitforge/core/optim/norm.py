"""The norm of all gradients as one value, and clipping by it. What ranks add up among themselves is not its matter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

# A dot product over this many elements keeps fp32 rounding near 1e-8 and still runs at memory speed.
PIECE = 2**18


@torch.no_grad()
def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all elements of `gradients`, which lie on one device: 0-dim, fp64 if any of them is, else fp32.

    On CPU torch's own norms add fp32 squares one after the other: 5e-3 off on 67M elements, and half as fast as the
    dot products used here (benchmarks/core/optim.md).
    """
    if not gradients:
        return torch.zeros(())
    dtype = torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32
    if gradients[0].device.type != "cpu":
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2, dtype)))
    squares = [torch.dot(piece, piece) for gradient in gradients for piece in _pieces(gradient, dtype)]
    return torch.stack(squares).sum(dtype=torch.float64).sqrt().to(dtype)


@torch.no_grad()
def clip_(gradients: Sequence[Tensor], norm: Tensor | float, max_norm: float) -> None:
    """Scale `gradients` in place by `max_norm / norm` when their `norm` is larger than `max_norm`.

    A norm that is not finite leaves them as they are: such a step is the loop's to skip.
    """
    size = float(norm)
    if max_norm < size < float("inf"):
        torch._foreach_mul_(list(gradients), max_norm / size)


def _pieces(gradient: Tensor, dtype: torch.dtype) -> Iterable[Tensor]:
    return (piece.to(dtype) for piece in gradient.reshape(-1).split(PIECE))
