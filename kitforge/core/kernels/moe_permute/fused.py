"""`moe_permute` by one gather each way: the backward pass adds the rows of a token, which no two tokens share."""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.moe_permute.reference import Permutation


def moe_permute(input: Tensor, permutation: Permutation) -> Tensor:
    rows: Tensor = _Permute.apply(input, permutation.positions, permutation.tokens)  # type: ignore[no-untyped-call]
    return rows


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(positions)
        return input.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (positions,) = ctx.saved_tensors
        exact = torch.promote_types(grad.dtype, torch.float32)
        found = grad.new_zeros(len(positions), grad.shape[1], dtype=exact)
        for choice in positions.unbind(1):
            found += grad.index_select(0, choice)
        return found.to(grad.dtype), None, None
