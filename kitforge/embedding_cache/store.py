"""The interface of every tier below the device: rows by key, in batches. A store knows no step, policy or optimizer.

Legend: keys [n] int64, any value; rows [n, width] float32; hits [n] bool. All are contiguous, on the CPU.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

from torch import Tensor


class RowStore(ABC):
    """Rows of one width by key.

    The keys of one call are distinct. A mask says which rows exist, never their values: a row of zeros is a row. A
    store may be called from several threads; each call is atomic. A call that raises leaves the rows it was given with
    its caller.
    """

    width: int

    @abstractmethod
    def read(self, keys: Tensor, out: Tensor) -> Tensor:
        """Copy the rows of `keys` into `out` [n, width] and return the hits; other rows of `out` are unchanged."""

    @abstractmethod
    def write(self, keys: Tensor, rows: Tensor) -> None:
        """Insert or replace the rows [n, width] of `keys`. They are copied."""

    @abstractmethod
    def delete(self, keys: Tensor) -> None:
        """Delete the rows of `keys`; missing keys are no error."""

    @abstractmethod
    def scan(self, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All keys with their rows, at most `chunk` at a time, in no order. The store must not change meanwhile."""

    def keys(self, chunk: int) -> Iterator[Tensor]:
        """All keys, at most `chunk` at a time. Keys inserted or moved meanwhile may be missing or come twice; a store
        whose `scan` does not allow changes overrides this."""
        return (keys for keys, _ in self.scan(chunk))

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows."""

    def num_rows(self, name: str) -> dict[str, int]:
        """The number of rows by tier, without reading any; `name` is the name of this store. A lower tier may hold
        old copies of rows that are further up."""
        return {name: len(self)}

    def close(self) -> None:
        """Release threads, files and connections. May be called again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
