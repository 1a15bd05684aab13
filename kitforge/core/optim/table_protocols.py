"""The interface between embedding tables and checkpoints. It knows no table, file or rank.

Rows are streamed in chunks: int64 ids [n], distinct over all chunks of a part, and rows [n, width]. A part is a named
set of such rows: "rows" are the table's own, or several parts named "rows-..." where a row is split. A table may have
other parts, such as the counts of ids without a row.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

# ids [n] and rows [n, width].
Chunk = tuple[Tensor, Tensor]
# The index of a rank's shard of ids, and the number of shards; (0, 1) is all ids.
RowShard = tuple[int, int]
ROWS = "rows"


def is_row_data(part: str) -> bool:
    """Whether a part holds rows of the table, of which an incremental source has only the changed ones. Other parts are
    always complete."""
    return part == ROWS or part.startswith(f"{ROWS}-")


class RowSource(Protocol):
    """The rows of a table at one instant: a snapshot of a training table, or a table of a checkpoint."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """The options that rows depend on, as plain values: name, dim, optimizer, initial rows, ..."""

    @property
    def version(self) -> int:
        """The table's change counter at that instant; it never decreases during training."""

    @property
    def since(self) -> int | None:
        """None: all rows. A version: only the rows changed after it, and `removed`."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Small state that belongs to no row and is equal on all ranks, such as past learning rates."""

    @property
    def shard(self) -> RowShard:
        """The shard of ids of these rows."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts."""

    def chunks(self, part: str = ROWS) -> Iterable[Chunk]:
        """The rows of a part. A chunk is valid until the next one is requested."""

    def removed(self) -> Iterator[Tensor]:
        """Ids [n] whose rows were removed after `since`; a row that came back is among the rows too."""

    def close(self) -> None:
        """Release the snapshot."""


@runtime_checkable
class RowTable(Protocol):
    """A table that can be saved and restored. All methods are called at a step boundary on all ranks."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """See `RowSource`."""

    @property
    def shard(self) -> RowShard:
        """See `RowSource`."""

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> RowSource:
        """A snapshot of the table, to be read by another thread while training goes on.

        With `since`, the version of the previous snapshot, only the rows changed after it. `is_base`: the next snapshot
        may be incremental to this one, so the table tracks changes from now on.
        """

    def load_rows(self, source: RowSource) -> None:
        """Restore rows of all tiers, optimizer state and counts from the source, of this rank's shard."""
