"""Datasets of the RLHF tasks: reading, length filter, truncation and the evaluation split."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kitforge.data.cache_folder import default_root
from kitforge.data.chat.datasets import (
    ChatDatasetReader,
    ExampleKind,
    PreferencePair,
    TokenizedExample,
    UnpairedExample,
)
from kitforge.data.chat.example_cache import ExampleCache, build_example_cache
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.mixture import source_error, weighted_sources
from kitforge.data.schedule import Mixture, train_eval_split
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
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
    mixture: Mixture | None = None  # of the sources of `train`, if they are weighted


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
        return found if self._truncation is None else truncated_row(found, self._room, self._truncation)

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
    """Read training and evaluation rows. Without an evaluation spec, data.eval_fraction of the training rows are held
    out. `reserved` tokens of data.sequence_length are left for completions. Raises DataError for rows that are too
    long."""
    read_specs = [_length_filtered([] if spec is None else read(spec), options, reserved) for spec in specs]
    (train, first), (evaluation, second) = read_specs
    if specs[1] is None:
        kept, held_out = train_eval_split(len(train), options.eval_fraction, seed)
        train, evaluation = train.take(kept), train.take(held_out)
    return DatasetSplits(train=train, eval=evaluation, pad_id=pad_id, fingerprint=fingerprint_of("rows", first, second))


class ConcatenatedSequence(Sequence[Row]):
    """Several sequences of rows, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Row]]) -> None:
        self._parts = list(parts)
        self._starts = list(accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        number = range(len(self))[row]
        part = bisect_right(self._starts, number) - 1
        return self._parts[part][number - self._starts[part]]


def read_examples(
    reader: ChatDatasetReader,
    tokenizer: Tokenizer,
    kind: ExampleKind,
    specs: tuple[object, object],
    options: ChatDatasetOptions,
    seed: int,
) -> DatasetSplits[Any]:
    """Training and evaluation rows as tokens, cached on disk. Several weighted sources are read one by one, and mixed.
    Raises DataError for rows that are too long, and for a source without rows."""
    entries = weighted_sources(specs[0], ("columns",))
    if entries is None:
        return read_rows(
            lambda spec: build_example_cache(
                reader, tokenizer, kind, spec, default_root(), num_workers=options.num_workers
            ),
            specs,
            options,
            seed=seed,
            pad_id=tokenizer.pad_id,
        )
    splits: list[DatasetSplits[Any]] = []
    for entry in entries:
        columns = entry.options.get("columns", reader.columns)
        check(isinstance(columns, Mapping), f"columns of {entry.name}", columns, "a mapping: {prompt: question}")
        try:
            own = reader.with_columns(columns)
            splits.append(read_examples(own, tokenizer, kind, (entry.source, specs[1]), options, seed))
            if not len(splits[-1].train):
                raise DataError("there are no training rows", expected="at least one")
        except DataError as error:
            raise source_error(entry.name, error) from None
    weights = tuple(entry.weight for entry in entries)
    mixture = Mixture(
        names=tuple(entry.name for entry in entries),
        weights=weights,
        num_rows=tuple(len(each.train) for each in splits),
        seed=seed,
        shuffle=options.shuffle,
        on_source_end=options.on_source_end,
    )
    return DatasetSplits(
        train=ConcatenatedSequence([each.train for each in splits]),
        eval=splits[0].eval if specs[1] is not None else ConcatenatedSequence([each.eval for each in splits]),
        pad_id=tokenizer.pad_id,
        fingerprint=fingerprint_of("mixture", weights, [each.fingerprint for each in splits]),
        mixture=mixture,
    )


def truncated_row(row: Any, room: int, side: str) -> Any:
    """The row with each example, or its prompt, truncated to `room` tokens: at the start ("left") or end ("right")."""
    if isinstance(row, PreferencePair):
        chosen, rejected = (truncated_row(each, room, side) for each in (row.chosen, row.rejected))
        return replace(row, chosen=chosen, rejected=rejected)
    if isinstance(row, UnpairedExample):
        return replace(row, completion=truncated_row(row.completion, room, side))
    kept = slice(max(len(row.tokens) - room, 0), None) if side == "left" else slice(room)
    if isinstance(row, TokenizedExample):
        return TokenizedExample(tokens=row.tokens[kept], loss_mask=row.loss_mask[kept])
    return replace(row, tokens=row.tokens[kept])


def _length_filtered(
    rows: Sequence[Row], options: ChatDatasetOptions, reserved: int
) -> tuple[DatasetView[Row], object]:
    """The rows within the length limit and their fingerprint. Longer rows are refused, truncated or dropped, as the
    options say."""
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
        limit += f", of which {reserved} are left for the completion (rollout.max_new_tokens)"
    if options.on_too_long != "drop" and (options.truncation is None or room < 1):
        raise DataError(
            f"{len(overlong)} of {len(rows)} rows are too long",
            got=f"up to {int(lengths.max())} tokens",
            expected=limit,
            fix="add a larger data.sequence_length, data.on_too_long=cut_left, cut_right or drop",
        )
    if reserved and options.truncation == "right":
        fix = "data.on_too_long=cut_left or drop, or a larger data.sequence_length"
        got = f"up to {int(lengths.max())} tokens, and data.on_too_long=cut_right"
        raise DataError("prompts cut on the right lose what opens the reply", got=got, expected=limit, fix=fix)
    lost = overlong if options.truncation is None else _invalid_after_truncation(rows, overlong, options, room)
    kept = np.setdiff1d(everything, lost)
    if not len(kept):
        raise DataError("all rows are too long", got=f"up to {int(lengths.max())} tokens", expected=limit)
    action = "dropped" if options.truncation is None else f"truncated on the {options.truncation}"
    _log.warning("%d of %d rows have more than %d tokens and are %s", len(overlong), len(rows), room, action)
    chosen = (options.truncation, room, fingerprint_of(lost.tobytes()))
    return DatasetView(rows, kept, room, options.truncation), (fingerprint, chosen)


def _invalid_after_truncation(
    rows: Sequence[Row], overlong: NDArray[np.int64], options: ChatDatasetOptions, room: int
) -> NDArray[np.int64]:
    """The rows without a trained token after truncation. Raises DataError unless data.on_invalid=skip."""
    cut = ((number, truncated_row(rows[int(number)], room, str(options.truncation))) for number in overlong)
    lost = np.array([number for number, row in cut if not _is_valid(row)], np.int64)
    if len(lost) and options.on_invalid == "refuse":
        raise DataError(
            f"{len(lost)} of {len(rows)} rows have no trained token after truncation",
            got=f"data.on_too_long={options.on_too_long} data.sequence_length={options.sequence_length}",
            fix="add data.on_too_long=cut_left, which keeps the ends, data.on_invalid=skip, or data.sequence_length=N",
        )
    if len(lost):
        _log.warning("%d of %d rows have no trained token after truncation and are dropped", len(lost), len(rows))
    return lost


def _is_valid(row: Any) -> bool:
    if isinstance(row, PreferencePair):
        is_same = np.array_equal(row.chosen.tokens, row.rejected.tokens)
        return _is_valid(row.chosen) and _is_valid(row.rejected) and not is_same
    example = row.completion if isinstance(row, UnpairedExample) else row
    # The first token of a row is never predicted.
    return bool(np.any(example.loss_mask[1:])) if isinstance(example, TokenizedExample) else len(row.tokens) > 0
