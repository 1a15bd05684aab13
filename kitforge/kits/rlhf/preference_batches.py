"""Micro-batches of pairs: the chosen responses [P, T], then the rejected ones, in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kitforge.data.chat_datasets import PreferencePair
from kitforge.data.schedule import BatchSchedule
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.rlhf.collate import input_tokens, pad_examples


def pair_batches(pairs: Sequence[PreferencePair], order: BatchSchedule, pad_id: int) -> list[MicroBatch]:
    """For each part of this rank's pairs: tokens and targets [2P, T], ends [2P], margins and weights [P], and their
    sources. A weight is 1, or 0 for the pair that stands in for none."""
    longest = [max(len(pair.chosen.tokens), len(pair.rejected.tokens)) for pair in pairs]
    parts = order.length_buckets([2 * length for length in longest])
    return [_pair_batch([pairs[index] for index in part], pad_id) for part in parts]


def pair_count(step: Sequence[MicroBatch]) -> Sums:
    """Pairs of this rank's part of the step."""
    pairs = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
    return {"loss": pairs, "samples": pairs, "input_tokens": input_tokens(step)}


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen and rejected [P] of both [2P]."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected


def _pair_batch(pairs: Sequence[PreferencePair], pad_id: int) -> MicroBatch:
    responses = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    whole = pad_examples(responses, pad_id)
    if not pairs:
        # A rank that has no pair left computes one that counts for nothing.
        whole = {name: torch.cat([column, column]) for name, column in whole.items()}
    return {
        **whole,
        "margins": torch.tensor([pair.margin for pair in pairs] or [0.0]),
        "weights": torch.ones(len(pairs)) if pairs else torch.zeros(1),
        "sources": [pair.source for pair in pairs] or [""],
    }
