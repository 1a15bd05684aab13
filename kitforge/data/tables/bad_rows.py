"""Chunks of a table as Arrow columns, and the policy for invalid rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
from kitforge.foundation.types import OnInvalid

_log = logger(__name__)

# What separates the decimals of a number that is written as text: a point, a comma, or either where a cell shows it.
DecimalMark = Literal["auto", ".", ","]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a row is invalid."""

    reason: str  # the text after the row's location: "has the wrong number of cells"
    got: object
    expected: str
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadRow:
    """An invalid row. Its location is computed on demand."""

    problem: Problem
    location: Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrowChunk:
    """A chunk of rows."""

    table: Any  # pyarrow.Table with the columns that were asked for
    location: Callable[[int], str]  # location of a row, for messages
    bad: tuple[BadRow, ...] = ()  # rows that could not be parsed into the table
    decimal: DecimalMark = "auto"


def check_names(table: str, names: Sequence[str]) -> None:
    """Raise DataError where two columns of a table have one name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        got = f"columns {', '.join(twice[:8])} twice"
        raise DataError(f"{table} has columns of one name", got=got, expected="a different name for every column")


@dataclass(slots=True, kw_only=True)
class BadRows:
    """The policy for invalid rows, with the numbers of skipped rows by reason."""

    policy: OnInvalid = "refuse"
    counts: Counter[str] = field(default_factory=Counter)

    def handle(self, rows: Iterable[BadRow]) -> None:
        """Raise DataError for the first invalid row, or count all of them."""
        for row in rows:
            problem = row.problem
            if self.policy == "refuse":
                skip = "data.on_invalid=skip leaves such rows out and counts them"
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
        """Log the numbers of skipped and kept rows of a table."""
        if self.total:
            reasons = "; ".join(f"{reason} ({count:,})" for reason, count in self.counts.most_common())
            count_text = f"{self.total:,} of {self.total + num_rows:,}"
            _log.warning("%s: %s rows are left out, each of which %s", name, count_text, reasons)

    @property
    def total(self) -> int:
        """Skipped rows."""
        return self.counts.total()
