"""The definition of `swap_rows`, in plain torch; the two slabs may be on different devices."""

from typing import Protocol

from torch import Tensor

from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.foundation.errors import ModelError


class SwapRowsKernel(Protocol):
    """Swap row `at[i]` of `one` [rows, width] with row `to[i]` of `other` [rows, width]; `at` are distinct, and so are
    `to`. Raises ModelError for an index out of range.
    """

    def __call__(self, one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None: ...


def swap_rows(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
    require_pairs(one, other, at, to)
    rows = one.index_select(0, at).to(other.device)
    one.index_copy_(0, at, other.index_select(0, to).to(one.device))
    other.index_copy_(0, to, rows)


def require_pairs(one: Tensor, other: Tensor, at: Tensor, to: Tensor) -> None:
    """Raise ModelError for an index out of range, or for unequal numbers of indices."""
    check_indices(at, len(one), "rows of the one slab")
    check_indices(to, len(other), "rows of the other slab")
    if len(at) != len(to):
        raise ModelError("rows cannot be swapped", got=f"{len(at)} rows for {len(to)}", expected="as many")
