"""`moe_unpermute` without a tensor of all rows in the order of tokens."""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.moe_permute.reference import Permutation


def moe_unpermute(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    tokens: Tensor = _Unpermute.apply(rows, weights, permutation.positions, permutation.tokens)  # type: ignore[no-untyped-call]
    return tokens


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, positions, tokens)
        exact = torch.promote_types(rows.dtype, torch.float32)
        found = rows.new_zeros(len(positions), rows.shape[1], dtype=exact)
        for choice, weight in zip(positions.unbind(1), weights.to(exact).unbind(1), strict=True):
            found.addcmul_(rows.index_select(0, choice).to(exact), weight.unsqueeze(1))
        return found.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights, positions, tokens = ctx.saved_tensors
        exact = torch.promote_types(rows.dtype, torch.float32)
        spread = grad.index_select(0, tokens).to(exact)
        by_row = weights.new_empty(weights.numel(), dtype=exact)
        by_row[positions.flatten()] = weights.to(exact).flatten()
        grad_weights = (rows.to(exact) * spread).sum(1)[positions].to(weights.dtype)
        return (spread * by_row.unsqueeze(1)).to(rows.dtype), grad_weights, None, None
