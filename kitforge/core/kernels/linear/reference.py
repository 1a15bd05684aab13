"""The definition of `linear`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.mixed_precision import match_dtype


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`input [..., in] @ weight [out, in].T + bias`."""
    return functional.linear(input, *match_dtype(input, weight, bias))
