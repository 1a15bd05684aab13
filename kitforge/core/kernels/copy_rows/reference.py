"""The definition of `copy_rows`, in plain torch."""

from typing import Protocol

from torch import Tensor

from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.foundation.errors import ModelError


class CopyRowsKernel(Protocol):
    """Copy row i of `source` [rows, width], or row `at[i]`, to row i of `target`, or row `to[i]`; `to` are distinct.

    Raises ModelError for an index out of range.
    """

    def __call__(
        self, source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None
    ) -> None: ...


def copy_rows(source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> None:
    require_rows(source, target, at, to)
    rows = source if at is None else source.index_select(0, at)
    if to is None:
        target.copy_(rows)
    else:
        target.index_copy_(0, to, rows)


def require_rows(source: Tensor, target: Tensor, at: Tensor | None, to: Tensor | None) -> None:
    """Raise ModelError for an index out of range, or if as many rows are not copied as there are targets."""
    if at is not None:
        check_indices(at, len(source), "rows of the source")
    if to is not None:
        check_indices(to, len(target), "rows of the target")
    num_from, num_to = len(source if at is None else at), len(target if to is None else to)
    if num_from != num_to:
        raise ModelError(
            "rows cannot be copied", got=f"{num_from} rows to {num_to} targets", expected="as many targets"
        )
