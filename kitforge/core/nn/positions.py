"""How a decoder tells positions apart: a learned table, rotary positions, or ALiBi."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kitforge.core.nn.rotary import RotaryConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A learned table [max_length, dim], added to the embedding (Radford et al., 2019)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ALiBi:
    """A bias of the attention scores that falls linearly with the distance, by a slope of each head (Press et al.,
    2022). It has no parameters, and no longest length."""


Positions = Learned | RotaryConfig | ALiBi


class PositionEncoding(NamedTuple):
    """What the attention of every layer knows of positions, besides what the stream holds."""

    rotary: tuple[Tensor, Tensor] | None = None  # cos and sin [B or 1, T, pairs]
    slopes: Tensor | None = None  # of ALiBi [heads], of all heads


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slope of each head [num_heads] in fp32: 2 ** (-8 / n), 2 ** (-16 / n), ... for n, the largest power of two up
    to `num_heads`; further heads have every other one of the slopes of 2 n heads."""
    largest = 1 << (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads, device=device)
    exponents = torch.where(heads < largest, 2 * heads + 2, 2 * (heads - largest) + 1)
    return torch.exp2(exponents * (-4.0 / largest))
