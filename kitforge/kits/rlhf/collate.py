"""Responses of several lengths as tensors: a row each, or packed into few rows. B rows, T tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kitforge.data.chat_datasets import TokenizedExample
from kitforge.data.packing import IGNORED
from kitforge.foundation.types import MicroBatch


def pad_examples(responses: Sequence[TokenizedExample], pad_id: int) -> dict[str, Tensor]:
    """A row for each response, filled on the right, which causal attention never looks at.

    `tokens` [B, T]; `targets` [B, T], the next token where it is learnt, -100 elsewhere; `ends` [B], where the last
    token of each stands; `lengths` [B], tokens that are no filling. One row in which nothing counts where there are no
    responses.
    """
    longest = max((len(each.tokens) for each in responses), default=1)
    tokens = torch.full((max(len(responses), 1), longest), pad_id)
    targets = torch.full_like(tokens, IGNORED)
    for row, response in enumerate(responses):
        _write_row(tokens[row], targets[row], response, 0)
    lengths = torch.tensor([len(each.tokens) for each in responses] or [0])
    return {"tokens": tokens, "targets": targets, "ends": (lengths - 1).clamp(min=0), "lengths": lengths}


def input_tokens(step: Sequence[MicroBatch]) -> Tensor:
    """How many tokens the micro-batches have, learnt or not, without filling."""
    return torch.stack([micro_batch["lengths"].sum() for micro_batch in step]).sum()


def pack_examples(responses: Sequence[TokenizedExample], pad_id: int, *, packing: bool = True) -> dict[str, Tensor]:
    """As few rows as the longest response allows, or a row for each unless `together`.

    `tokens` and `targets` [B, T] as in `padded`; `positions` from 0 in each response; `documents` from 0 in each row;
    `members` and `lengths` [B], how many responses a row holds and how many tokens they have.
    """
    longest = max(len(each.tokens) for each in responses)
    lengths = [len(each.tokens) for each in responses]
    rows = _best_fit(lengths, longest) if packing else [[member] for member in range(len(lengths))]
    tokens = torch.full((len(rows), longest), pad_id)
    targets, documents = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    positions = torch.arange(longest).repeat(len(rows), 1)
    for row, members in enumerate(rows):
        start = 0
        for document, member in enumerate(members):
            stop = start + len(responses[member].tokens)
            _write_row(tokens[row], targets[row], responses[member], start)
            positions[row, start:stop], documents[row, start:stop] = torch.arange(stop - start), document
            start = stop
        # Filling behind the only response of a row is never looked at, and needs no number of its own.
        positions[row, start:] = torch.arange(longest - start)
        documents[row, start:] = len(members) if len(members) > 1 else 0
    return {
        "tokens": tokens,
        "targets": targets,
        "positions": positions,
        "documents": documents,
        "members": torch.tensor(list(map(len, rows))),
        "lengths": torch.tensor([sum(lengths[member] for member in members) for members in rows]),
    }


def _write_row(tokens: Tensor, targets: Tensor, response: TokenizedExample, start: int) -> None:
    """Write a response into a row [T]. The token at i is predicted at i - 1."""
    size = len(response.tokens)
    written = np.asarray(response.tokens, dtype=np.int64)
    tokens[start : start + size] = torch.from_numpy(written)
    targets[start : start + size - 1] = torch.from_numpy(np.where(response.loss_mask[1:], written[1:], IGNORED))


def _best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which sequences share a row: each, the longest first, goes where it leaves the least room (best fit)."""
    rows: list[list[int]] = []
    left: list[int] = []
    for member in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        fitting = [row for row, free in enumerate(left) if free >= lengths[member]]
        if not fitting:
            rows.append([])
            left.append(room)
        row = min(fitting, key=left.__getitem__) if fitting else len(rows) - 1
        rows[row].append(member)
        left[row] -= lengths[member]
    return rows
