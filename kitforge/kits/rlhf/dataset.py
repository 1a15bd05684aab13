"""Rows of a stage: reading, length filter and truncation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.chat_datasets import PreferencePair, TokenizedExample, UnpairedExample
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.example_cache import ExampleCache
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.log import logger
from kitforge.kits.rlhf.batching import train_eval_split
from kitforge.kits.rlhf.config import ChatDatasetOptions

Row = TypeVar("Row")
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSplits(Generic[Row]):
    """Training and evaluation rows."""

    train: Sequence[Row]
    eval: Sequence[Row]
    pad_id: int
    fingerprint: str

    def check_same(self, fingerprint: str, allowed: bool) -> None:
        """Raise ConfigError for another fingerprint, unless changes are allowed."""
        if fingerprint != self.fingerprint and not allowed:
            raise ConfigError(
                "the training rows are not those that the run began with",
                got=f"rows {self.fingerprint[:12]}",
                expected=f"rows {fingerprint[:12]}",
                fix="put the files back, or add trainer.allow_data_changes=true to go on all the same",
            )


@final
class DatasetView(Sequence[Row]):
    """Rows of a sequence by index, truncated to `room` tokens."""

    def __init__(self, rows: Sequence[Row], numbers: NDArray[np.int64], room: int, truncation: str | None) -> None:
        self._rows = rows
        self._numbers = numbers
        self._room = room
        self._truncation = truncation

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return self.take(np.arange(len(self))[row])
        found = self._rows[int(self._numbers[row])]
        return found if self._truncation is None else truncated(found, self._room, self._truncation)

    def take(self, indices: NDArray[np.int64]) -> DatasetView[Row]:
        """A subset of the rows."""
        return DatasetView(self._rows, self._numbers[indices], self._room, self._truncation)


def read_rows(
    read: Callable[[object], Sequence[Row]],
    specs: tuple[object, object],
    options: ChatDatasetOptions,
    *,
    seed: int,
    pad_id: int,
    reserved: int = 0,
) -> DatasetSplits[Row]:
    """Read the training and the evaluation spec, of which one is there; without the second a share of the training rows
    is kept for it. `reserved` tokens of data.sequence_length are kept for answers. Raises DataError for rows that are
    longer than the rest."""
    read_specs = [_length_filtered([] if spec is None else read(spec), options, reserved) for spec in specs]
    (train, first), (evaluation, second) = read_specs
    if specs[1] is None:
        kept, held_out = train_eval_split(len(train), options.eval_fraction, seed)
        train, evaluation = train.take(kept), train.take(held_out)
    return DatasetSplits(train=train, eval=evaluation, pad_id=pad_id, fingerprint=fingerprint_of("rows", first, second))


def truncated(row: Any, room: int, side: str) -> Any:
    """The row with at most `room` tokens in each response, or in its prompt: without the first ones ("left") or without
    the last ones ("right")."""
    if isinstance(row, PreferencePair):
        return replace(row, chosen=truncated(row.chosen, room, side), rejected=truncated(row.rejected, room, side))
    if isinstance(row, UnpairedExample):
        return replace(row, response=truncated(row.response, room, side))
    kept = slice(max(len(row.tokens) - room, 0), None) if side == "left" else slice(room)
    if isinstance(row, TokenizedExample):
        return TokenizedExample(tokens=row.tokens[kept], loss_mask=row.loss_mask[kept])
    return replace(row, tokens=row.tokens[kept])


def _length_filtered(
    rows: Sequence[Row], options: ChatDatasetOptions, reserved: int
) -> tuple[DatasetView[Row], object]:
    """Rows that are short enough, and what tells them from others; those that are not are refused or, where that was
    asked for, cut, or left out and counted."""
    room = options.sequence_length - reserved
    if isinstance(rows, ExampleCache):
        lengths, fingerprint = rows.lengths, rows.fingerprint
    else:
        lengths, fingerprint = (
            np.array([len(cast(Any, row).tokens) for row in rows], np.int64),
            fingerprint_of("rows", rows),
        )
    overlong = np.flatnonzero(lengths > room)
    everything = np.arange(len(rows), dtype=np.int64)
    if not len(overlong):
        return DatasetView(rows, everything, room, None), fingerprint
    limit = f"at most data.sequence_length={options.sequence_length} tokens"
    if reserved:
        limit += f", of which {reserved} are kept for the answer (rollout.max_new_tokens)"
    if options.on_too_long == "refuse" and (options.truncation is None or room < 1):
        raise DataError(
            f"{len(overlong)} of {len(rows)} rows are too long",
            got=f"up to {int(lengths.max())} tokens",
            expected=limit,
            fix="a larger data.sequence_length, data.truncation=left|right to cut them, or data.on_too_long=drop",
        )
    lost = overlong if options.truncation is None else _invalid_after_truncation(rows, overlong, options, room)
    kept = np.setdiff1d(everything, lost)
    if not len(kept):
        raise DataError("no row is short enough", expected=limit)
    action = "left out" if options.truncation is None else f"cut on the {options.truncation}"
    _log.warning("%d of %d rows have more than %d tokens and are %s", len(overlong), len(rows), room, action)
    chosen = (options.truncation, room, fingerprint_of(lost.tobytes()))
    return DatasetView(rows, kept, room, options.truncation), (fingerprint, chosen)


def _invalid_after_truncation(
    rows: Sequence[Row], overlong: NDArray[np.int64], options: ChatDatasetOptions, room: int
) -> NDArray[np.int64]:
    """The rows of which nothing to learn is left once they are cut. Raises DataError unless such may be left out."""
    cut = ((number, truncated(rows[int(number)], room, str(options.truncation))) for number in overlong)
    lost = np.array([number for number, row in cut if not _is_valid(row)], np.int64)
    if len(lost) and options.on_invalid == "refuse":
        raise DataError(
            f"{len(lost)} of {len(rows)} rows have nothing to learn once they are cut",
            got=f"data.truncation={options.truncation} data.sequence_length={options.sequence_length}",
            fix="data.truncation=left keeps the ends, data.on_invalid=drop leaves such rows out; or a longer sequence",
        )
    if len(lost):
        _log.warning("%d of %d rows have nothing to learn once they are cut and are left out", len(lost), len(rows))
    return lost


def _is_valid(row: Any) -> bool:
    if isinstance(row, PreferencePair):
        is_same = np.array_equal(row.chosen.tokens, row.rejected.tokens)
        return _is_valid(row.chosen) and _is_valid(row.rejected) and not is_same
    response = row.response if isinstance(row, UnpairedExample) else row
    # The first token of a row is never predicted.
    return bool(np.any(response.loss_mask[1:])) if isinstance(response, TokenizedExample) else len(row.tokens) > 0
