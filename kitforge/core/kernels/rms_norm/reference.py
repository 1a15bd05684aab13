"""The definition of `rms_norm`."""

from typing import Protocol

import torch
from torch import Tensor


class RMSNormKernel(Protocol):
    """`input / sqrt(mean(input²) + eps) * weight` over the last dim, reduced in fp32 (Zhang and Sennrich, 2019)."""

    def __call__(self, input: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`input / sqrt(mean(input²) + eps) * weight`; the norm is in fp32, cast back, then multiplied by the weight."""
    exact = input.to(torch.promote_types(input.dtype, torch.float32))
    normal = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return normal.to(input.dtype) * weight
