"""The rows of a stage, read into tokens before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kitforge.data.shard import digest
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.log import logger
from kitforge.kits.rlhf.config import DialogueOptions
from kitforge.kits.rlhf.order import split

Row = TypeVar("Row")
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows(Generic[Row]):
    """What is trained on and what is evaluated on."""

    train: Sequence[Row]
    eval: Sequence[Row]
    pad_id: int
    fingerprint: str

    def check_same(self, fingerprint: str, allowed: bool) -> None:
        """Raise ConfigError for rows other than those of that fingerprint, unless it is allowed."""
        if fingerprint != self.fingerprint and not allowed:
            raise ConfigError(
                "the training rows are not those that the run began with",
                got=f"rows {self.fingerprint[:12]}",
                expected=f"rows {fingerprint[:12]}",
                fix="put the files back, or add trainer.allow_data_changes=true to go on all the same",
            )


def read_rows(
    read: Callable[[object], Iterable[Row]],
    length: Callable[[Row], int],
    specs: tuple[object, object],
    options: DialogueOptions,
    *,
    seed: int,
    pad_id: int,
) -> Rows[Row]:
    """Read the training and the evaluation spec, of which one is there; without the second a share of the training rows
    is kept for it. Raises DataError for rows that are longer than data.sequence_length."""
    train, evaluation = ([] if spec is None else _fitting(list(read(spec)), length, options) for spec in specs)
    fingerprint = digest("rows", train, evaluation)
    if specs[1] is None:
        kept, held_out = split(len(train), options.validation, seed)
        train, evaluation = [train[index] for index in kept], [train[index] for index in held_out]
    return Rows(train=train, eval=evaluation, pad_id=pad_id, fingerprint=fingerprint)


def _fitting(rows: list[Row], length: Callable[[Row], int], options: DialogueOptions) -> list[Row]:
    """Rows that are short enough; the others are refused or, where that was asked for, left out and counted."""
    limit = options.sequence_length
    fitting = [row for row in rows if length(row) <= limit]
    num_overlong = len(rows) - len(fitting)
    if num_overlong and options.overlong == "refuse":
        raise DataError(
            f"{num_overlong} of {len(rows)} rows are too long",
            got=f"up to {max(map(length, rows))} tokens",
            expected=f"at most data.sequence_length={limit}",
            fix="a larger data.sequence_length, or data.overlong=drop to leave them out",
        )
    if not fitting:
        raise DataError("no row is short enough", expected=f"at most data.sequence_length={limit} tokens")
    if num_overlong:
        _log.warning("%d of %d rows have more than %d tokens and are left out", num_overlong, len(rows), limit)
    return fitting
