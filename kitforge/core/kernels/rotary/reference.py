"""The definition of `rotary`."""

from typing import Protocol

import torch
from torch import Tensor


class RotaryKernel(Protocol):
    """Rotates the first `2 * cos.shape[-1]` features of input [batch, heads, length, head_dim] by the angles given as
    cos and sin [batch or 1, length, pairs]; pairs are (i, i + pairs), or (2i, 2i + 1) when interleaved (Su et al.)."""

    def __call__(self, input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, /) -> Tensor: ...


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See `RotaryKernel`. Angles are fp32; the products are taken in fp32 at least and cast back."""
    turned, unrotated = input[..., : 2 * cos.shape[-1]], input[..., 2 * cos.shape[-1] :]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((pairs.to(input.dtype), unrotated), dim=-1)
