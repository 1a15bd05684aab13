"""The batches of alignment rows: the schedule of a run, batches of forward passes, and the evaluation split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kitforge.core.parallel.world import World
from kitforge.data.schedule import BatchSchedule, Indices, token_budget_batches
from kitforge.data.splitmix64 import hash_array
from kitforge.foundation.seed import key
from kitforge.kits.rlhf.config import StageOptions
from kitforge.trainer.task import batch_schedule

# Tokens of a forward pass on a CPU: with more, activations leave its caches.
CPU_TOKENS = 1024
# On other devices: the widest layer of a model of 7 billion weights then holds 1 to 2 GiB.
DEVICE_TOKENS = 2**15


def row_schedule(num_rows: int, options: StageOptions, world: World) -> BatchSchedule:
    """The batches over the training rows; micro-batches are cut by tokens unless trainer.micro_batch_size is given."""
    return batch_schedule(
        options,
        world,
        num_rows=num_rows,
        batch_size=options.data.batch_size,
        shuffle=options.data.shuffle,
        max_tokens=CPU_TOKENS if world.device.type == "cpu" else None,
    )


def forward_batches(lengths: Sequence[int], max_tokens: int | None, device: torch.device) -> list[Indices]:
    """Batches of rows of these lengths for a forward pass without gradients; `max_tokens` None: as many as suit the
    device."""
    if max_tokens is None:
        max_tokens = CPU_TOKENS if device.type == "cpu" else DEVICE_TOKENS
    return token_budget_batches(range(len(lengths)), lengths, max_tokens)


def train_eval_split(num_rows: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """The rows to train on and those kept for evaluation, none where `fraction` is 0. A row stays where it is when
    others are added behind it."""
    everything = np.arange(num_rows, dtype=np.int64)
    if fraction == 0 or num_rows < 2:
        return everything, everything[:0]
    chances = hash_array(everything.astype(np.uint64), key(seed, "validation")) / 2.0**64
    is_kept = chances < fraction
    # Neither part may be empty, however small or large the fraction.
    is_kept[np.argmin(chances)], is_kept[np.argmax(chances)] = True, False
    return everything[~is_kept], everything[is_kept]
