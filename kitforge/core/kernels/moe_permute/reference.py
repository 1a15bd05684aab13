"""The definition of `moe_permute`: rows of tokens in the order of their experts.

T tokens, k experts for each, E experts.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Permutation(NamedTuple):
    """Which rows the experts get."""

    positions: Tensor  # int64 [T, k]: the row of each choice; rows of an expert are in the order of tokens
    tokens: Tensor  # int64 [T * k]: the token of each row
    ends: Tensor  # int32 [E]: the row after the last one of each expert, as `F.grouped_mm` wants it


class MoEPermuteKernel(Protocol):
    """Rows `input[tokens]` [T * k, dim] of input [T, dim]: each token once for each of its experts."""

    def __call__(self, input: Tensor, permutation: Permutation) -> Tensor: ...


def permutation_of(experts: Tensor, num_experts: int) -> Permutation:
    """The permutation for experts int64 [T, k] below num_experts, on their device and without waiting for it."""
    order = experts.flatten().argsort(stable=True)
    positions = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, device=experts.device)
    ends = torch.searchsorted(experts.flatten()[order], numbers, right=True)
    return Permutation(positions.view_as(experts), order // max(experts.shape[1], 1), ends.to(torch.int32))


def moe_permute(input: Tensor, permutation: Permutation) -> Tensor:
    return input[permutation.tokens]
