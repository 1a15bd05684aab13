"""What a table has counted: where rows were found, how many moved, who waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

# From the top down; `new` is no tier: there the row began.
SOURCES = ("device", "host", "file", "remote", "new")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Counts since the table was made. Rows are counted once a lookup, however often their id occurs in it."""

    lookups: int  # calls that were planned
    hits: dict[str, int]  # distinct rows by the tier that had them; they add up to `rows`
    rows: int  # distinct rows asked for, summed over lookups
    moved: dict[str, int]  # rows written to each tier
    moved_bytes: dict[str, int]
    evicted: int  # rows that left the device tier
    overflow_rows: int  # rows for which the device tier had no place and grew for a while
    waits: int  # times that planning waited for the training to finish with rows
    unadmitted: int  # distinct rows without admission, summed over lookups
    expired: int  # rows given up for good
    resident: dict[str, int]  # rows in each tier now

    @property
    def hit_rate(self) -> float:
        """The share of rows that were in the device tier already."""
        return self.hits["device"] / self.rows if self.rows else 0.0


@final
class TableCounters:
    """The running counts behind `TableStats`. Each is written by whoever plans, one thread at a time."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._moved: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def count_hits(self, source: str, num: int) -> None:
        """So many rows were found there."""
        self._hits[source] += num

    def count_moved(self, tier: str, num: int, width: int) -> None:
        """So many rows of `width` numbers were written to a tier."""
        self._moved[tier] += num
        self._bytes[tier] += 4 * width * num

    def stats(self, resident: dict[str, int]) -> TableStats:
        """The counts as they are."""
        names = ("lookups", "evicted", "overflow_rows", "waits", "unadmitted", "expired")
        hits = {source: self._hits[source] for source in SOURCES}
        return TableStats(
            hits=hits,
            rows=sum(hits.values()),
            moved=dict(self._moved),
            moved_bytes=dict(self._bytes),
            resident=resident,
            **{name: self.events[name] for name in names},
        )
