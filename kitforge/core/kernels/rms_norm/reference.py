"""The definition of `rms_norm`."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`input / sqrt(mean(input²) + eps) * weight`; the scale is found in fp32, cast back, then weighted."""
    exact = input.to(torch.promote_types(input.dtype, torch.float32))
    normal = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return normal.to(input.dtype) * weight
