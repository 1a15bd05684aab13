"""Which rows a step takes, and which of them this rank: a pure function of the cursor. Knows no row's content."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.core.parallel.world import World
from kitforge.data.sampler import shuffled_indices
from kitforge.data.splitmix64 import hash_array
from kitforge.foundation.seed import key
from kitforge.foundation.types import Cursor
from kitforge.kits.rlhf.config import StageOptions

Indices = NDArray[np.int64]
# Tokens of one pass through a network on a processor: with more, what layers hand on leaves its caches.
CPU_TOKENS = 1024
# Elsewhere, where nobody says how many; of a network of 7 billion weights its widest layer then holds 1 GiB or two.
DEVICE_TOKENS = 2**15


@final
class BatchSchedule:
    """The order of `num_rows` rows, and the share of this rank."""

    def __init__(self, num_rows: int, options: StageOptions, world: World) -> None:
        self._num_rows = num_rows
        self._options = options
        self._world = world

    def num_steps(self, epochs: float) -> int:
        """Steps in that many passes over the rows; the last one may be smaller."""
        return math.ceil(math.ceil(self._num_rows * epochs) / self._options.data.batch_size)

    def batches(self, cursor: Cursor) -> Iterator[Indices]:
        """The rows of each step from the cursor on, over all ranks."""
        size, epochs = self._options.data.batch_size, self._options.trainer.epochs
        is_open = epochs is None and self._options.trainer.max_steps is not None
        limit = None if is_open else math.ceil(self._num_rows * (epochs or 1.0))
        sample = cursor.samples
        while limit is None or sample < limit:
            wanted = size if limit is None else min(size, limit - sample)
            yield shuffled_indices(
                self._options.seed, self._num_rows, sample, wanted, shuffle=self._options.data.shuffle
            )
            sample += wanted

    def evaluation_batches(self, num_rows: int) -> Iterator[Indices]:
        """The evaluation rows batch by batch, over all ranks."""
        size, limit = self._options.data.batch_size, self._options.trainer.eval_batches
        stop = num_rows if limit is None else min(num_rows, limit * size)
        for start in range(0, stop, size):
            yield np.arange(start, min(start + size, stop), dtype=np.int64)

    def micro_batches(self, num_rows: int) -> list[Indices]:
        """This rank's part of a batch of so many rows, micro-batch by micro-batch. All ranks have as many; those of a
        rank that has no rows left are empty."""
        ranks = self._world.num_replicas
        largest = -(-num_rows // ranks)
        size = self._options.trainer.micro_batch_size or largest
        begin, end = (num_rows * each // ranks for each in (self._world.replica, self._world.replica + 1))
        own = np.arange(begin, end, dtype=np.int64)
        return [own[start : start + size] for start in range(0, largest, size)]

    def length_buckets(self, lengths: Sequence[int], max_tokens: int | None) -> list[Indices]:
        """The same for rows of these lengths, where a micro-batch may have so many tokens, filling among them; the
        longest rows come first. None: as many as are fast where trainer.micro_batch_size leaves it open."""
        ranks = self._world.num_replicas
        if max_tokens is None and self._options.trainer.micro_batch_size is None:
            max_tokens = CPU_TOKENS if self._world.device.type == "cpu" else None
        if max_tokens is None:
            return self.micro_batches(len(lengths))
        bounds = [len(lengths) * each // ranks for each in range(ranks + 1)]
        cuts = [_fit_token_budget(range(*each), lengths, max_tokens) for each in zip(bounds, bounds[1:], strict=False)]
        nothing = np.zeros(0, dtype=np.int64)
        own = cuts[self._world.replica]
        return own + [nothing] * (max(map(len, cuts)) - len(own))


def _fit_token_budget(indices: range, lengths: Sequence[int], max_tokens: int) -> list[Indices]:
    longest_first = sorted(indices, key=lambda each: (-lengths[each], each))
    found: list[list[int]] = []
    for index in longest_first:
        # All rows of a grid are as wide as its first.
        if not found or lengths[found[-1][0]] * (len(found[-1]) + 1) > max_tokens:
            found.append([])
        found[-1].append(index)
    return [np.array(each, dtype=np.int64) for each in found]


def token_budget_batches(lengths: Sequence[int], max_tokens: int | None, device: torch.device) -> list[Indices]:
    """Which rows of these lengths share a forward pass that nobody wants a gradient of, the longest first: as many as
    have so many tokens, filling among them, and at least one; None: as many tokens as suit the device."""
    if max_tokens is None:
        max_tokens = CPU_TOKENS if device.type == "cpu" else DEVICE_TOKENS
    return _fit_token_budget(range(len(lengths)), lengths, max_tokens)


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
