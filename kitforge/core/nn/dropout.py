"""Dropout for batches of many small samples: masks are a pure function of (seed, step, name, sample)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select
from kitforge.foundation import seed as seeds
from kitforge.foundation.device import copy_to


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleDropout:
    """The key of the dropout masks of a forward pass; they do not depend on the split into micro-batches."""

    seed: int
    step: int
    samples: Tensor  # int64 [B], the global index of each sample


def sample_dropout(input: Tensor, rate: float, name: str, dropout_key: SampleDropout | None) -> Tensor:
    """Inverted dropout of `input` [B, dim] with probability `rate`; the identity without a key."""
    if rate == 0.0 or dropout_key is None:
        return input
    key = seeds.key(dropout_key.seed, "sample noise", dropout_key.step, name)
    samples = copy_to(dropout_key.samples, input.device)
    mask = select("O1", samples.device.type).keep_mask(key, samples, 0, input.shape[1], rate)
    return torch.where(mask, input, 0.0).div_(1.0 - rate)
