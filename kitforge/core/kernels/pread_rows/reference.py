"""The definition of `pread_rows`, in plain Python."""

import os
from typing import Protocol

from torch import Tensor

from kitforge.core.kernels.tables.indexing import check_indices


class PreadRowsKernel(Protocol):
    """Read row `at[i]` of an open file, with rows as wide as those of `out` [rows, width], into row `to[i]` of `out`.

    Returns the number of rows read; the contents of the others are undefined. Raises ModelError for an index out of
    range in `out`.
    """

    def __call__(self, file: int, out: Tensor, at: Tensor, to: Tensor) -> int: ...


def pread_rows(file: int, out: Tensor, at: Tensor, to: Tensor) -> int:
    check_indices(to, len(out), "rows of the target")
    rows, size = out.numpy(), out.shape[1] * out.element_size()
    num_read = 0
    for position, row in zip(at.tolist(), to.tolist(), strict=True):
        try:
            num_read += os.preadv(file, [rows[row].data], position * size) == size
        except OSError:
            continue
    return num_read
