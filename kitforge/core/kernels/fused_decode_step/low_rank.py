"""The updates of adapters in a compiled step, for runs of adjacent tokens that have the same one: `down @ x` in a phase
before each product, and `up` times it added to each panel that the product writes. Tokens without an adapter have the
bits that they have without these."""

from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL
from kitforge.core.kernels.cpu_engine.numba_runtime import array_at, compiled_fastmath, int64_at
from kitforge.core.kernels.cpu_engine.spin_barrier import barrier, finish, next_chunk
from kitforge.core.kernels.fused_decode_step.reference import LINEARS, DecoderWeights
from kitforge.core.kernels.fused_decode_step.rows import update_row, write_row
from kitforge.core.kernels.linear.numba import multiply

# Tokens of a run, at most: those of a block of rows that a product takes at once.
RUN_ROWS = 64
# Numbers of an update in a table: the addresses of `Update`, and the rank.
_COLUMNS = 4


def runs_of(adapters: Tensor | None) -> Any:
    """Runs [runs, 3] of tokens of an adapter: its number, the first token, and how many. None crosses a multiple of
    `RUN_ROWS`."""
    numbers = [] if adapters is None else adapters.tolist()
    parts = [list(part) for _, part in groupby(enumerate(numbers), lambda each: (each[1], each[0] // RUN_ROWS))]
    found = [(part[0][1], part[0][0], len(part)) for part in parts if part[0][1] >= 0]
    return np.array(found, dtype=np.int64).reshape(-1, 3)


def table_of(weights: DecoderWeights) -> tuple[Any, int, list[Tensor]]:
    """The updates [layers, `LINEARS`, adapters, 4], all 0 where an adapter has none, and the largest rank; with the
    tensors that must stay alive, in the dtype of the products."""
    table = np.zeros((len(weights.layers), len(LINEARS), len(weights.adapters), _COLUMNS), dtype=np.int64)
    kept: list[Tensor] = []
    for adapter, layers in enumerate(weights.adapters):
        for layer, updates in enumerate(layers):
            for name, (down, up, rescaling) in updates.items():
                tensors = [each for each in (down, up, rescaling) if each is not None]
                kept += tensors
                addresses = [down.data_ptr(), up.data_ptr(), 0 if rescaling is None else rescaling.data_ptr()]
                table[layer, LINEARS.index(name), adapter] = [*addresses, len(down)]
    return table, int(table[..., 3].max(initial=0)), kept


@compiled_fastmath
def reduced(step: Any, linear: int, token: int) -> Any:
    """The address of the rows of `down @ x` from a token on, of one of `LINEARS`."""
    size = array_at(step.reduced, (1,), step.like).itemsize
    return step.reduced + size * step.max_rank * (linear * step.num_tokens + token)


@compiled_fastmath
def reduce_runs(step: Any, rows: Any, weights: Any, scratch: int, phase: int) -> Any:
    """Write `down @ x` of all runs, for linear layers of the same rows, each by its `_linear`."""
    if step.num_runs == 0:
        return phase
    runs, like, tiled = int64_at(step.runs, (step.num_runs, 3)), step.like, step.has_tiles
    size, sums, memory = array_at(rows[0], (1,), like).itemsize, (scratch, PANEL), scratch + 4 * PANEL * RUN_ROWS
    num_chunks, chunk = step.num_runs * len(weights), next_chunk(phase)
    while chunk < num_chunks:
        weight, (adapter, first, count) = weights[chunk % len(weights)], runs[chunk // len(weights)]
        down, _, _, rank = int64_at(weight[4] + 8 * _COLUMNS * adapter, (_COLUMNS,))
        begin, target = rows[0] + size * rows[1] * first, reduced(step, weight[5], first)
        for panel in range((rank + PANEL - 1) // PANEL):
            start, width = PANEL * panel, min(PANEL, rank - PANEL * panel)
            multiply(like, tiled, begin, down, 0, 0, True, sums, count, rank, rows[1], panel, panel, memory)
            for row in range(count):
                write_row(scratch + 4 * PANEL * row, target + size * (rank * row + start), like, width)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def add_updates(step: Any, weights: Any, num_outputs: int, target: Any, rows: Any, scratch: int) -> None:
    """Add the updates of the runs within some rows, the first and how many, to the target: a panel of the outputs of a
    linear layer, by the address where it and the rows begin, the width of a row, and its number."""
    output, stride, panel = target
    like, tiled, start = step.like, step.has_tiles, PANEL * panel
    sums, memory, width = (scratch, PANEL), scratch + 4 * PANEL * RUN_ROWS, min(PANEL, num_outputs - start)
    bias = weights[1] + array_at(weights[1], (1,), like).itemsize * start if weights[1] else 0
    for adapter, first, count in int64_at(step.runs, (step.num_runs, 3)):
        _, up, rescaling, rank = int64_at(weights[4] + 8 * _COLUMNS * adapter, (_COLUMNS,))
        if rows[0] <= first < rows[0] + rows[1] and rank:
            reduced_rows = reduced(step, weights[5], first)
            multiply(like, tiled, reduced_rows, up, 0, 0, True, sums, count, num_outputs, rank, panel, panel, memory)
            for row in range(count):
                address = output + 4 * stride * (first - rows[0] + row)
                own = rescaling + 4 * start if rescaling else 0
                update_row(address, scratch + 4 * PANEL * row, width, like, bias, own)
