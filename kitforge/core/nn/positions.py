"""How a network tells positions apart: a learned table, rotary positions, ALiBi, or a learned relative bias."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kitforge.core.nn.rotary import RotaryConfig
from kitforge.foundation.config import check


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A learned table [max_length, dim], added to the embedding (Radford et al., 2019)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ALiBi:
    """A bias of the attention scores that falls linearly with the distance, by a slope of each head (Press et al.,
    2022). It has no parameters, and no longest length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """A learned bias of the attention scores by the distance in buckets, exact up to half of them, then logarithmic up
    to `max_distance` (Raffel et al., 2020). All layers of a stack share it."""

    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        check(self.num_buckets >= 4, "model.num_buckets", self.num_buckets, "4 or more")
        expected = f"more than model.num_buckets={self.num_buckets}"
        check(self.max_distance > self.num_buckets, "model.max_distance", self.max_distance, expected)


Positions = Learned | RotaryConfig | ALiBi


class PositionEncoding(NamedTuple):
    """What the attention of every layer knows of positions, besides what the stream holds."""

    # Cos and sin [B or 1, T, pairs] of each rotation that layers choose from.
    rotary: tuple[tuple[Tensor, Tensor], ...] = ()
    slopes: Tensor | None = None  # of ALiBi [heads], of all heads
    bias: Tensor | None = None  # learned [heads, queries, keys], of the heads on this rank
    indices: Tensor | None = None  # the positions [B, T] or [T], where a query layer looks them up


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slope of each head [num_heads] in fp32: 2 ** (-8 / n), 2 ** (-16 / n), ... for n, the largest power of two up
    to `num_heads`; further heads have every other one of the slopes of 2 n heads."""
    largest = 1 << (num_heads.bit_length() - 1)
    heads = torch.arange(num_heads, device=device)
    exponents = torch.where(heads < largest, 2 * heads + 2, 2 * (heads - largest) + 1)
    return torch.exp2(exponents * (-4.0 / largest))


class RelativeBias(nn.Module):
    """The table [num_buckets, heads] of a learned relative bias."""

    def __init__(self, config: Relative, num_heads: int, is_causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_buckets, num_heads))
        self.config = config
        self.is_causal = is_causal

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias [heads, Q, K] for positions of queries [Q] and of keys [K], by the bucket of their distance. Later
        keys have buckets of their own unless the attention is causal."""
        count, largest, distances = self.config.num_buckets, self.config.max_distance, keys - queries.unsqueeze(1)
        offset = torch.zeros_like(distances)
        if self.is_causal:
            distances = -distances.clamp(max=0)
        else:
            count //= 2
            offset, distances = (distances > 0) * count, distances.abs()
        exact = count // 2
        # In fp32, in which the published models were trained.
        octaves = torch.log(distances.clamp(min=1).float() / exact) / math.log(largest / exact)
        coarse = (exact + (octaves * (count - exact)).long()).clamp(max=count - 1)
        buckets = offset + torch.where(distances < exact, distances, coarse)
        return self.weight[buckets].permute(2, 0, 1)
