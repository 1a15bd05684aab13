"""What every tier below the device is: rows by key, in batches. A store knows no step, policy or optimizer.

Legend: keys [n] int64, any value of them; rows [n, width] float32; found [n] bool. All are contiguous, on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torch import Tensor


class RowStore(ABC):
    """Rows of one width by key.

    The keys of one call are distinct. Whether a row is there is said by a mask, never by its value: a row of zeros is a
    row. A store may be called from several threads; each call is seen whole or not at all. A call that raises leaves
    the rows it was given with its caller.
    """

    width: int

    @abstractmethod
    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy the rows of `keys` into `out` [n, width] and return which were found; the others of `out` are left."""

    @abstractmethod
    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Put `rows` [n, width] in, in place of what was there under their keys. They are copied."""

    @abstractmethod
    def take(self, keys: Tensor, out: Tensor) -> Tensor:
        """`read`, and let go of the rows that were found."""

    @abstractmethod
    def delete(self, keys: Tensor) -> None:
        """Let go of the rows of `keys`; those that are not there are no error."""

    @abstractmethod
    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All keys with their rows, at most `chunk` at a time, in no order. Nothing may change meanwhile."""

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """All keys, at most `chunk` at a time. Those that come or move meanwhile may be left out, or come twice; a
        store whose `scan` cannot bear changes has its own way."""
        return (keys for keys, _ in self.scan(chunk))

    @abstractmethod
    def __len__(self) -> int:
        """How many rows there are."""

    def num_rows(self, name: str) -> dict[str, int]:
        """How many rows each tier of the store has, without a look at any; `name` is the store's. A lower tier may have
        old copies of rows that are further up."""
        return {name: len(self)}

    @abstractmethod
    def flush(self) -> None:
        """Return when what was written would survive the end of this process, as far as the tier can promise it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of threads, files and connections. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
