"""The definition of `moe_unpermute`: the weighted sum of what a token's experts found."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.moe_permute.reference import Permutation


class MoEUnpermuteKernel(Protocol):
    """Tokens [T, dim], the sums of rows [T * k, dim] at `positions` times weights [T, k]: added in fp32 at least, in
    the dtype of the rows. With weights of one it is the transpose of `moe_permute`."""

    def __call__(self, rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor: ...


def moe_unpermute(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    exact = torch.promote_types(rows.dtype, torch.float32)
    return (rows[permutation.positions].to(exact) * weights.to(exact).unsqueeze(-1)).sum(1).to(rows.dtype)
