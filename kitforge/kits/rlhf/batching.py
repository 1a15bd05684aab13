"""The batches of every task: the schedule of a run, padding and packing, and the evaluation split. B rows, T tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.data.chat.datasets import PreferencePair, TokenizedExample
from kitforge.data.schedule import BatchSchedule, Indices, shared_prompt_batches, token_budget_batches
from kitforge.foundation.types import IGNORED, MicroBatch
from kitforge.kits.rlhf.config import StageOptions
from kitforge.trainer.task import batch_schedule

# Tokens of a forward pass on a CPU: with more, activations leave its caches; with fewer, weights are cast and gradients
# added, more often.
CPU_TOKENS = 2048
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
        max_tokens=CPU_TOKENS if world.device_type == "cpu" else None,
    )


def forward_batches(
    lengths: Sequence[int], max_tokens: int | None, device: torch.device, prompts: Sequence[bytes] | None = None
) -> list[Indices]:
    """Batches of rows of these lengths for forward passes without gradients, each of at most `max_tokens` tokens; None:
    a default of the device. For prompts, see `shared_prompt_batches`."""
    if max_tokens is None:
        max_tokens = CPU_TOKENS if device.type == "cpu" else DEVICE_TOKENS
    if prompts is None:
        return token_budget_batches(range(len(lengths)), lengths, max_tokens)
    return shared_prompt_batches(range(len(lengths)), lengths, max_tokens, prompts)


def pad_examples(examples: Sequence[TokenizedExample], pad_id: int) -> dict[str, Tensor]:
    """One row per example, padded on the right, which causal attention never reads.

    `tokens` [B, T]; `targets` [B, T], the next token where it is trained on, -100 elsewhere; `ends` [B], the position
    of the last token; `lengths` [B], the tokens without padding. Without examples, one padding row.
    """
    longest = max((len(each.tokens) for each in examples), default=1)
    tokens = torch.full((max(len(examples), 1), longest), pad_id)
    targets = torch.full_like(tokens, IGNORED)
    for row, example in enumerate(examples):
        _write_row(tokens[row], targets[row], example, 0)
    lengths = torch.tensor([len(each.tokens) for each in examples] or [0])
    return {"tokens": tokens, "targets": targets, "ends": (lengths - 1).clamp(min=0), "lengths": lengths}


def input_tokens(step: Sequence[MicroBatch]) -> Tensor:
    """Number of tokens of the micro-batches without padding."""
    return torch.stack([micro_batch["lengths"].sum() for micro_batch in step]).sum()


def pack_examples(examples: Sequence[TokenizedExample], pad_id: int, *, packing: bool = True) -> dict[str, Tensor]:
    """Examples packed into rows as long as the longest of them; without `packing`, one row per example.

    `tokens` and `targets` [B, T] as in `pad_examples`; `positions` from 0 in each example; `documents` from 0 in each
    row; `members` and `lengths` [B], the number of examples in a row and of their tokens.
    """
    longest = max(len(each.tokens) for each in examples)
    lengths = [len(each.tokens) for each in examples]
    rows = _best_fit(lengths, longest) if packing else [[member] for member in range(len(lengths))]
    tokens = torch.full((len(rows), longest), pad_id)
    targets, documents = torch.full_like(tokens, IGNORED), torch.zeros_like(tokens)
    positions = torch.arange(longest).repeat(len(rows), 1)
    for row, members in enumerate(rows):
        start = 0
        for document, member in enumerate(members):
            stop = start + len(examples[member].tokens)
            _write_row(tokens[row], targets[row], examples[member], start)
            positions[row, start:stop], documents[row, start:stop] = torch.arange(stop - start), document
            start = stop
        # Nothing attends to padding behind a single example, so it needs no document number of its own.
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


def _write_row(tokens: Tensor, targets: Tensor, example: TokenizedExample, start: int) -> None:
    """Write an example to a row [T]. The token at i is predicted at i - 1."""
    size = len(example.tokens)
    written = np.asarray(example.tokens, dtype=np.int64)
    tokens[start : start + size] = torch.from_numpy(written)
    targets[start : start + size - 1] = torch.from_numpy(np.where(example.loss_mask[1:], written[1:], IGNORED))


def _best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Best-fit packing: sequences, longest first, go to the row with the least remaining room."""
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


def pair_batches(pairs: Sequence[PreferencePair], order: BatchSchedule, pad_id: int) -> list[MicroBatch]:
    """This rank's micro-batches of pairs: tokens and targets [2P, T], ends [2P], margins and weights [P], sources.
    Weights are 1, or 0 for a padding pair."""
    longest = [max(len(pair.chosen.tokens), len(pair.rejected.tokens)) for pair in pairs]
    parts = order.length_buckets([2 * length for length in longest])
    return [_pair_batch([pairs[index] for index in part], pad_id) for part in parts]


def split_pairs(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split [2P] into chosen and rejected [P]."""
    chosen, rejected = values.chunk(2)
    return chosen, rejected


def _pair_batch(pairs: Sequence[PreferencePair], pad_id: int) -> MicroBatch:
    whole = pad_examples([pair.chosen for pair in pairs] + [pair.rejected for pair in pairs], pad_id)
    if not pairs:
        # A rank without pairs computes a padding pair of weight 0.
        whole = {name: torch.cat([column, column]) for name, column in whole.items()}
    return {
        **whole,
        "margins": torch.tensor([pair.margin for pair in pairs] or [0.0]),
        "weights": torch.ones(len(pairs)) if pairs else torch.zeros(1),
        "sources": [pair.source for pair in pairs] or [""],
    }
