"""The linear layers of a decoding step alone, by the product that the compiled step runs, without norms, activations,
attention and sampling."""

import functools
import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL
from kitforge.core.kernels.cpu_engine.matrix_microkernel import release
from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, HALF, compiled_fastmath, run_on_threads
from kitforge.core.kernels.cpu_engine.spin_barrier import BYTES_PER_PHASE, barrier, finish, next_chunk
from kitforge.core.kernels.cpu_engine.threads import num_threads
from kitforge.core.kernels.linear.numba import (
    LINE,
    aligned,
    empty_lines,
    multiply,
    packed_size,
    prefers_matrix_unit,
    scratch_size,
)


def packed_seconds(weights: list[Tensor], rows: int, calls: int = 15) -> float:
    """Median seconds of the products of so many rows with all weights [out, in], in fp32 or bfloat16, one after
    another. Their panels are packed once; as in a step, threads share the panels of a weight and then wait for one
    another."""
    half = weights[0].dtype is not torch.float32
    panels = empty_lines(sum(map(packed_size, weights)))
    starts = itertools.accumulate(map(packed_size, weights), initial=panels.data_ptr())
    table = np.array([[each.data_ptr(), start, *each.shape] for each, start in zip(weights, starts, strict=False)])
    input = torch.ones(rows, max(each.shape[1] for each in weights), dtype=weights[0].dtype)
    output = torch.empty(rows, max(len(each) for each in weights))
    times = []
    for call in range(calls + 1):
        counts = torch.zeros(len(weights) * BYTES_PER_PHASE // 8, dtype=torch.long)
        addresses = input.data_ptr(), output.data_ptr(), counts.data_ptr()
        kind = HALF if half else FLOAT, half and prefers_matrix_unit(), call == 0
        work = functools.partial(_multiply_all, kind, table, addresses, rows, num_threads())
        start = time.perf_counter()
        run_on_threads(work, num_threads())
        times.append(time.perf_counter() - start)
    # The first call packs.
    return statistics.median(times[1:])


@compiled_fastmath
def _multiply_all(kind: Any, table: Any, addresses: Any, num_rows: int, threads: int) -> None:
    """The products with all weights, whose address, panels and shape are the rows of the table; `kind` is the element
    type, whether the matrix unit multiplies, and whether panels are packed."""
    (like, has_tiles, packs), (input, output, phase) = kind, addresses
    size = 0
    for layer in range(len(table)):
        size = max(size, scratch_size(num_rows, table[layer, 3]))
    memory = np.empty((size + LINE) // 4, dtype=np.float32)
    scratch = aligned(memory.ctypes.data)
    for layer in range(len(table)):
        weight, kept, width, depth = table[layer, 0], table[layer, 1], table[layer, 2], table[layer, 3]
        num_panels, panel = (width + PANEL - 1) // PANEL, next_chunk(phase)
        while panel < num_panels:
            columns, then = (output + 4 * PANEL * panel, width), panel + threads
            multiply(
                like, has_tiles, input, weight, 0, kept, packs, columns, num_rows, width, depth, panel, then, scratch
            )
            panel = finish(phase)
        phase = barrier(phase, num_panels)
    release(has_tiles)
    # numba frees an array after its last use, and does not know of addresses.
    memory[0] = 0
