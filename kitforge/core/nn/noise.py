"""Dropout for batches of many small samples: noise is a pure function of (seed, step, name, sample)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.foundation import seed as seeds

# A generator for each sample would cost more than the network. Samples come in runs of consecutive numbers, so a block
# of them is drawn at once; at most two blocks of a micro-batch are drawn for a part of their rows.
SAMPLES_PER_BLOCK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNoise:
    """Names the noise of one forward pass: the same key gives the same masks, whatever the micro-batch split."""

    seed: int
    step: int
    samples: Tensor  # int64 [B], the global number of every sample

    def mask(self, name: str, dim: int, rate: float) -> Tensor:
        """[B, dim] holding 0 with probability `rate`, else 1 / (1 - rate)."""
        blocks, places = torch.unique_consecutive(self.samples // SAMPLES_PER_BLOCK, return_inverse=True)
        drawn = torch.stack([self._block(name, block, dim) for block in blocks.tolist()])
        rows = drawn[places, self.samples % SAMPLES_PER_BLOCK]
        return (rows >= rate).float() / (1.0 - rate)

    def _block(self, name: str, block: int, dim: int) -> Tensor:
        generator = seeds.generator(self.seed, "sample noise", self.step, name, block)
        return torch.rand(SAMPLES_PER_BLOCK, dim, generator=generator)


def drop(input: Tensor, rate: float, name: str, noise: SampleNoise | None) -> Tensor:
    """`input` [B, dim] with each element zeroed with probability `rate`; unchanged without noise."""
    if rate == 0.0 or noise is None:
        return input
    return input * noise.mask(name, input.shape[1], rate).to(input.device, input.dtype)
