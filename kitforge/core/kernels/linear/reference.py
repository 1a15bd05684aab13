"""The definition of `linear`."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd.mixed_precision import match_dtype
from kitforge.core.kernels.autograd.recomputation import kept_operations


class LinearKernel(Protocol):
    """`input [..., in] @ weight [out, in].T + bias [out]`, in the autocast dtype where autocast is on."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input [..., in] @ weight [out, in].T + bias`."""
    return kept_operations(functional.linear, input, *match_dtype(input, weight, bias))
