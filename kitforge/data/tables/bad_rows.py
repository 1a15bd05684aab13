"""Some rows of a table as Arrow columns, and what is done about those that cannot be read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, final

from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger

_log = logger(__name__)

OnBadRow = Literal["error", "skip"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong with a row."""

    reason: str  # goes on after the row's place: "has the wrong number of cells"
    got: object
    expected: str
    fix: str | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """A row that cannot be used. Its place is found out only when somebody asks."""

    problem: Problem
    location: Callable[[], str]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowChunk:
    """Rows that were read together."""

    table: Any  # pyarrow.Table with the columns that were asked for
    location: Callable[[int], str]  # where a row of it stands, for a person
    bad: tuple[BadRow, ...] = ()  # rows that did not even become part of the table


@final
@dataclass(slots=True, kw_only=True)
class BadRows:
    """The policy about bad rows, and how many were left out by it, by reason."""

    policy: OnBadRow = "error"
    counts: Counter[str] = field(default_factory=Counter)

    def handle(self, rows: Iterable[BadRow]) -> None:
        """Raise the DataError about the first one, or count them all."""
        for row in rows:
            problem = row.problem
            if self.policy == "error":
                skip = "data.on_bad_row=skip leaves such rows out and counts them"
                raise DataError(
                    f"{row.location()} {problem.reason}",
                    got=problem.got,
                    expected=problem.expected,
                    fix=f"{problem.fix}, or {skip}" if problem.fix else f"repair the row, or {skip}",
                )
            if not self.counts[problem.reason]:
                _log.warning(
                    "%s %s (got %s): left out, as are further ones", row.location(), problem.reason, problem.got
                )
            self.counts[problem.reason] += 1

    def log_summary(self, name: str, num_rows: int) -> None:
        """Say how many rows of a table were left out, beside those that were kept."""
        if self.total:
            reasons = "; ".join(f"{reason} ({count:,})" for reason, count in self.counts.most_common())
            count_text = f"{self.total:,} of {self.total + num_rows:,}"
            _log.warning("%s: %s rows are left out, each of which %s", name, count_text, reasons)

    @property
    def total(self) -> int:
        """Rows left out."""
        return self.counts.total()
