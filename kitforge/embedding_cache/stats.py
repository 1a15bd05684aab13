"""Counters of a table: hits by tier, rows moved, waits."""

from collections import Counter
from dataclasses import dataclass

# The tiers from the top down; `new` is not a tier: the row was initialized.
SOURCES = ("device", "host", "file", "remote", "new")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    """Counts since the table was made. A row counts once per lookup, however often its id occurs in it."""

    lookups: int  # planned calls
    hits: dict[str, int]  # distinct rows by the tier that had them; they add up to `rows`
    rows: int  # distinct rows, summed over lookups
    moved: dict[str, int]  # rows written to each tier
    moved_bytes: dict[str, int]
    evicted: int  # rows that left the device tier
    overflow_rows: int  # rows by which the device tier outgrew its capacity for a while
    waits: int  # times that planning waited for the training to finish with rows
    unadmitted: int  # distinct rows without admission, summed over lookups
    expired: int  # rows deleted by expiry
    resident: dict[str, int]  # rows in each tier now

    @property
    def hit_rate(self) -> float:
        """The fraction of rows that the device tier had."""
        return self.hits["device"] / self.rows if self.rows else 0.0


class TableCounters:
    """The running counts behind `TableStats`. Only the planning thread writes them, one at a time."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()  # by source
        self.moved: Counter[str] = Counter()  # by tier

    def stats(self, width: int, resident: dict[str, int]) -> TableStats:
        """The counts as they are, for rows of `width` numbers."""
        names = ("lookups", "evicted", "overflow_rows", "waits", "unadmitted", "expired")
        hits = {source: self.hits[source] for source in SOURCES}
        return TableStats(
            hits=hits,
            rows=sum(hits.values()),
            moved=dict(self.moved),
            moved_bytes={tier: 4 * width * num for tier, num in self.moved.items()},
            resident=resident,
            **{name: self.events[name] for name in names},
        )
