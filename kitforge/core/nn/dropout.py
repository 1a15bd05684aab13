"""Dropout for batches of many small samples: noise is a pure function of (seed, step, name, sample)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.foundation import seed as seeds


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDropout:
    """Names the noise of one forward pass: the same key gives the same masks, whatever the micro-batch split."""

    seed: int
    step: int
    samples: Tensor  # int64 [B], the global number of every sample

    def mask(self, name: str, dim: int, rate: float) -> Tensor:
        """Boolean [B, dim], False with probability `rate`."""
        key = seeds.key(self.seed, "sample noise", self.step, name)
        return select("O1", self.samples.device.type).keep_mask(key, self.samples, 0, dim, rate)


def sample_dropout(input: Tensor, rate: float, name: str, noise: SampleDropout | None) -> Tensor:
    """`input` [B, dim] with each element zeroed with probability `rate`; unchanged without noise."""
    if rate == 0.0 or noise is None:
        return input
    return torch.where(noise.mask(name, input.shape[1], rate).to(input.device), input, 0.0).div_(1.0 - rate)
