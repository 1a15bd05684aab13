"""The definition of `grouped_linear`: a linear layer of several experts, each over its own rows."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype


class GroupedLinearKernel(Protocol):
    """Rows [R, out] of input [R, in] and weight [E, out, in]: those before `ends[0]` times the transposed matrix of the
    first expert, those from there to `ends[1]` times that of the second, and so on; in the autocast dtype where
    autocast is on. `ends` is int32 [E], rising. Rows past the last end are zero, and so are their gradients."""

    def __call__(self, input: Tensor, weight: Tensor, ends: Tensor) -> Tensor: ...


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    input, start = input.to(compute_dtype(input)), 0
    products = []
    for matrix, end in zip(weight.to(input.dtype), ends.tolist(), strict=True):
        products.append(functional.linear(input[start:end], matrix))
        start = end
    return torch.cat([*products, input.new_zeros(len(input) - start, weight.shape[1])])
