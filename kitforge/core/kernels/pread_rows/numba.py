"""`pread_rows` by system calls from a compiled loop, which releases the GIL while it waits for the disk."""

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled
from kitforge.core.kernels.tables.indexing import check_indices

Indices = NDArray[np.int64]

_external: Any = types.ExternalFunction
# POSIX pread, with addresses as integers.
_pread: Any = _external("pread", types.intp(types.intc, types.intp, types.uintp, types.int64))


def pread_rows(file: int, out: Tensor, at: Tensor, to: Tensor) -> int:
    check_indices(to, len(out), "rows of the target")
    return int(_read(file, out.data_ptr(), out.shape[1] * out.element_size(), at.numpy(), to.numpy()))


@compiled
def _read(file: int, address: int, size: int, at: Indices, to: Indices) -> int:
    num_read = 0
    for number in range(len(at)):
        num_read += _pread(file, address + to[number] * size, size, at[number] * size) == size
    return num_read
