"""A part of a table: a file or rows in memory, read in chunks that any thread makes."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kitforge.data.tables.bad_rows import ArrowChunk

Job: TypeAlias = Callable[[], ArrowChunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """`chunks` gives those of columns in order; a row that misspells one of the known names is a bad row, where each
    row has names of its own."""

    name: str  # for messages
    find_names: Callable[[], tuple[str, ...]]
    chunks: Callable[[tuple[str, ...], frozenset[str]], Iterator[Job]]
    delimiter: str = ""  # between the cells of a text

    @property
    def names(self) -> tuple[str, ...]:
        """Its columns. To find those of JSON Lines costs a second, which a rank that maps the columns of another one
        saves."""
        return self.find_names()

    def jobs(self, columns: Sequence[str], known: frozenset[str] = frozenset()) -> Iterator[Job]:
        """Chunks in order, to be made by any thread."""
        return self.chunks(tuple(columns), known)
