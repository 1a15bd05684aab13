"""What a table of rows gives to a checkpoint and takes from one. No table, file or rank is known here.

Rows go in chunks: int64 ids [n], distinct over all chunks of a part, and rows [n, width]. A part is a set of such rows
by name: "rows" are the table's own, or several parts that begin with "rows-" where a row is in pieces. A table may have
others, e.g. the counts of ids that have no row yet.

Legend: n rows of a chunk, width numbers a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor

# ids [n] and rows [n, width].
Chunk = tuple[Tensor, Tensor]
# Which share of all ids a rank has, and of how many; (0, 1) is all of them.
RowShard = tuple[int, int]
ROWS = "rows"


def is_row_data(part: str) -> bool:
    """Whether a part is of the table's own rows, so that a source of changes has only those that changed. Of any other
    part it has all."""
    return part == ROWS or part.startswith(f"{ROWS}-")


class RowSource(Protocol):
    """The rows of a table at one instant: a table's snapshot while it trains, or what a checkpoint holds of it."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """What makes rows of this table no other's, as plain values: name, dim, optimizer, how ids begin, ..."""
        ...

    @property
    def version(self) -> int:
        """The table's count of changes at that instant; it never falls while the table trains."""
        ...

    @property
    def since(self) -> int | None:
        """None: all rows. A version: only those rows that changed after it, and `removed`."""
        ...

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What belongs to no row and is equal on all ranks, e.g. past learning rates. Small."""
        ...

    @property
    def shard(self) -> RowShard:
        """The share of ids whose rows are here."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that `chunks` knows."""
        ...

    def chunks(self, part: str = ROWS) -> Iterable[Chunk]:
        """The rows of that part. A chunk holds good until the next one is asked for."""
        ...

    def removed(self) -> Iterator[Tensor]:
        """Ids [n] whose rows went away after `since`; one that came back is among the rows too."""
        ...

    def close(self) -> None:
        """Nothing more will be asked for; the table need not keep that instant any longer."""
        ...


@runtime_checkable
class RowTable(Protocol):
    """A table whose rows can be kept. All methods are called at a step boundary, on all ranks alike."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """That of its snapshots."""
        ...

    @property
    def shard(self) -> RowShard:
        """That of its snapshots."""
        ...

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> RowSource:
        """The table as it is now, to be read by another thread while the table goes on.

        With a version, which is that of the snapshot before, only what changed after it. `is_base`: the next snapshot
        may ask for what changed after this one, so the table has to keep account of that.
        """
        ...

    def load_rows(self, source: RowSource) -> None:
        """Become what the source holds, all tiers, optimizer state and counts; take what belongs to this rank."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRows:
    """A `RowSource` over rows that are in memory and stay as they are."""

    schema: Mapping[str, Any]
    version: int
    chunks_by_part: Mapping[str, Chunk]  # by part
    since: int | None = None
    shard: RowShard = (0, 1)
    state: Mapping[str, Tensor] = field(default_factory=dict)
    removed_ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))  # ids [n]

    @property
    def parts(self) -> tuple[str, ...]:
        """See `RowSource`."""
        return tuple(self.chunks_by_part)

    def chunks(self, part: str = ROWS) -> Iterator[Chunk]:
        """See `RowSource`."""
        yield self.chunks_by_part[part]

    def removed(self) -> Iterator[Tensor]:
        """See `RowSource`."""
        yield self.removed_ids

    def close(self) -> None:
        """See `RowSource`."""
