"""`linear` in fp32 or bfloat16 without gradients: an output's bits depend on its own row and weights alone.

Few rows, as those of a decoding step, are multiplied at the speed of memory: vendors' products repack a weight first
and then read it up to three times slower than memory allows. Here a panel of the weight is transposed in registers and
multiplied with all rows while it lies in the caches. Sums are in fp32.
"""

import functools
import logging
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, PANEL, ROWS, tile, transpose
from kitforge.core.kernels.cpu_engine.matrix_microkernel import has_matrix_unit, multiply_tiles, release
from kitforge.core.kernels.cpu_engine.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled,
    compiled_fastmath,
    float32_at,
    int64_at,
    parallel_for,
    widened,
)
from kitforge.core.kernels.cpu_engine.vectors import LANES, part_at, to_precision, vector_at, write_part, write_vector

_log = logging.getLogger(__name__)
# Multiplications per thread, at least: waking one takes as long as a million of them, and a single thread nearly
# saturates the memory bandwidth.
GRAIN = 2**23
# Words of a panel that are multiplied at once: few enough for the L2 cache.
PANEL_WORDS = 1024
# Bytes of a cache line: vectors of a panel must not cross two.
LINE = 64


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `LinearKernel`; for contiguous weights in fp32 or bfloat16 on CPU, without gradients."""
    num_outputs, num_features = weight.shape
    rows = input.contiguous()
    output = torch.empty(*input.shape[:-1], num_outputs)
    # Weights are passed by address: `Tensor.numpy` would make their storage non-resizable, but FSDP resizes it when it
    # gathers and frees parameters.
    arguments = (
        FLOAT if weight.dtype is torch.float32 else HALF,
        weight.dtype is not torch.float32 and prefers_matrix_unit(),
        rows.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        output.data_ptr(),
        output.numel() // max(num_outputs, 1),
        num_outputs,
        num_features,
    )
    panels, grain = -(-num_outputs // PANEL), GRAIN // max(rows.numel() * PANEL, 1) + 1
    parallel_for(lambda start, stop: _multiply_panels(*arguments, start, stop), panels, grain)
    return output if input.dtype is torch.float32 else output.to(input.dtype)


# The matrix unit multiplies where it takes at most this part of the time of vector instructions, for so many rows and
# panels of so many words.
_WORTH, _NUM_ROWS, _WORDS = 0.6, 64, 288


@functools.cache
def prefers_matrix_unit() -> bool:
    """Whether products in bfloat16 take it; measured once a process. A narrow victory would make the choice, and the
    bits, a matter of chance."""
    if not has_matrix_unit():
        return False
    own, other = _seconds(False), _seconds(True)
    rates = [2 * _NUM_ROWS * PANEL * 2 * _WORDS / each / 1e9 for each in (own, other)]
    _log.info("products of %d rows in bfloat16: vectors %.0f, tiles %.0f GFLOP/s a thread", _NUM_ROWS, *rates)
    return other < _WORTH * own


def _seconds(has_tiles: bool) -> float:
    """Of the fastest of several calls, which are too short for another process to disturb all of them."""
    rows, panel = (np.zeros((count, 2 * _WORDS), dtype=np.uint16) for count in (_NUM_ROWS, PANEL))
    sums, times = np.zeros((_NUM_ROWS, PANEL), dtype=np.float32), []
    one, other, result = rows.ctypes.data, panel.ctypes.data, sums.ctypes.data
    for _ in range(50):
        start = time.perf_counter()
        multiply_rows(HALF, has_tiles, one, 4 * _WORDS, _NUM_ROWS, other, _WORDS, result, 0, other)
        times.append(time.perf_counter() - start)
    release(has_tiles)
    return min(times)


_all, _four, _one = (tile(rows) for rows in (ROWS, 4, 1))


@compiled_fastmath
def aligned(address: int) -> int:
    """The first address from this one on that begins a cache line."""
    return (address + LINE - 1) // LINE * LINE


@compiled_fastmath
def scratch_size(num_rows: int, num_features: int) -> int:
    """Bytes that `multiply` needs besides."""
    exact = 0 if PAIRS else num_rows * num_features
    return 4 * (PANEL * (PANEL_WORDS + 2 * num_rows + 2) + exact)


@compiled_fastmath
def _multiply_panels(
    like: Any,
    has_tiles: bool,
    rows: int,
    weight: int,
    bias: int,
    output: int,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    start: int,
    stop: int,
) -> None:
    memory = np.empty(scratch_size(num_rows, num_features) // 4 + LINE // 4, dtype=np.float32)
    scratch = aligned(memory.ctypes.data)
    for panel in range(start, stop):
        result = output + 4 * PANEL * panel, num_outputs
        multiply(
            like,
            has_tiles,
            rows,
            weight,
            bias,
            0,
            True,
            result,
            num_rows,
            num_outputs,
            num_features,
            panel,
            panel + 1,
            scratch,
        )
    release(has_tiles)
    # numba frees an array after its last use, and does not know of addresses.
    memory[0] = 0


def packed_size(weight: Tensor) -> int:
    """Bytes of a weight whose panels are kept; the features that do not fill a tile are not in them."""
    return -(-len(weight) // PANEL) * 4 * PANEL * (weight[0].nbytes // 4 // LANES * LANES)


def empty_lines(size: int) -> Tensor:
    """Memory of so many bytes from the start of a cache line on, in huge pages, without which a thread reads half as
    fast: numpy asks the system for them, torch does not."""
    memory = torch.from_numpy(np.empty(size + LINE, dtype=np.uint8))
    first = -memory.data_ptr() % LINE
    return memory[first : first + size]


@compiled_fastmath
def multiply(
    like: Any,
    has_tiles: bool,
    rows: int,
    weight: int,
    bias: int,
    kept: int,
    packs: bool,
    output: Any,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    panel: int,
    following: int,
    scratch: int,
) -> None:
    """rows [rows, in] @ weight [out, in].T + bias [out], rounded to the type of `like`, for the outputs `PANEL * panel`
    to `PANEL * (panel + 1) - 1`, by addresses. They are written as fp32 to `output`, an address and a width of its
    rows; all others have the element type of `like`; a bias at 0 is none. `scratch` is an `aligned` address of
    `scratch_size` bytes.

    The panels of the weight are at `kept`, of `packed_size` bytes: written there if the call `packs`, else only read.
    At 0 none are kept, and a call must pack. Panel `following`, which this thread will multiply next, is prefetched: it
    may lie behind the last one, where the panels of another weight begin."""
    start, itemsize = PANEL * panel, array_at(rows, (1,), like).itemsize
    addresses, words = int64_at(scratch, (PANEL,)), scratch + 8 * PANEL
    sums = words + 4 * PANEL * PANEL_WORDS
    if packs:
        for lane in range(PANEL):
            # Where a panel is narrower, the last row is multiplied again.
            addresses[lane] = weight + min(start + lane, num_outputs - 1) * num_features * itemsize
    features_per_word = 4 // itemsize
    num_words = num_features // features_per_word // LANES * LANES
    is_few = num_rows < ROWS // 2
    for first in range(0, num_words, PANEL_WORDS):
        count = min(PANEL_WORDS, num_words - first)
        if kept:
            words = kept + 4 * PANEL * (panel * num_words + first)
        if packs:
            # It is prefetched while this one is packed, or while it is multiplied if that takes longer.
            ahead = weight + following * PANEL * num_features * itemsize + 4 * PANEL * first
            pack_panel(scratch, first, count, words, ahead if is_few or has_tiles else words)
            ahead = words if is_few or has_tiles else ahead
        else:
            ahead = words + 4 * PANEL * (following - panel) * num_words
        add_products(like, has_tiles, rows, num_rows, num_features, first, count, words, sums, first, ahead)
    tiled = num_words * features_per_word
    part = float32_at(sums, (num_rows, PANEL))
    if tiled == 0:
        part[:] = 0
    if tiled < num_features:
        input, matrix = (
            array_at(rows, (num_rows, num_features), like),
            array_at(weight, (num_outputs, num_features), like),
        )
        _add_remainder(input, matrix[start : min(start + PANEL, num_outputs)], part, tiled)
    write_sums(like, sums, bias, output, num_rows, num_outputs, start)


@compiled_fastmath
def write_sums(like: Any, sums: int, bias: int, output: Any, num_rows: int, num_outputs: int, start: int) -> None:
    """Write sums [rows, `PANEL`] of the outputs from `start` on, with a bias [out], or none at 0, to an output, an
    address and a width of its rows, rounded to the type of `like`."""
    width, size = min(PANEL, num_outputs - start), array_at(bias, (1,), like).itemsize
    for row in range(num_rows):
        for lane in range(0, width, LANES):
            numbers = vector_at(sums + 4 * (PANEL * row + lane), FLOAT)
            if bias:
                numbers = numbers + part_at(bias + size * (start + lane), like, width - lane)
            write_part(to_precision(numbers, like), output[0] + 4 * (output[1] * row + lane), FLOAT, width - lane)


@compiled_fastmath
def pack_panel(addresses: int, first: int, count: int, words: int, ahead: int) -> None:
    """Transpose `count` words of the rows at `PANEL` addresses, from word `first` on, to a panel at `words`. Memory
    from `ahead` on is prefetched."""
    for word in range(0, count, LANES):
        offset, target = 4 * (first + word), words + 4 * PANEL * word
        near, far = ahead + 4 * PANEL * word, ahead + 4 * PANEL * word + 4 * LANES * LANES
        transpose(addresses, offset, target, near)
        transpose(addresses + 8 * LANES, offset, target + 4 * LANES, far)


@compiled_fastmath
def add_products(
    like: Any,
    has_tiles: bool,
    rows: int,
    num_rows: int,
    num_features: int,
    first: int,
    count: int,
    words: int,
    sums: int,
    adds: int,
    ahead: int,
) -> None:
    """Write the products of all rows with a panel of `count` words, from word `first` on, to sums [rows, `PANEL`]; add
    them unless `adds` is 0."""
    if PAIRS:
        row_bytes = num_features * array_at(rows, (1,), like).itemsize
        multiply_rows(like, has_tiles, rows + 4 * first, row_bytes, num_rows, words, count, sums, adds, ahead)
    else:
        size = array_at(rows, (1,), like).itemsize
        exact, width = sums + 4 * PANEL * num_rows, 4 // size * count
        for row in range(num_rows):
            source, target = rows + size * num_features * row + 4 * first, exact + 4 * width * row
            for k in range(0, width, LANES):
                write_vector(vector_at(source + size * k, like), target + 4 * k, FLOAT)
        multiply_panel(FLOAT, like, exact, 4 * width, num_rows, words, count, sums, first, ahead)


@compiled_fastmath
def multiply_rows(
    like: Any,
    has_tiles: bool,
    rows: int,
    row_bytes: int,
    num_rows: int,
    panel: int,
    num_words: int,
    sums: int,
    adds: int,
    ahead: int,
) -> None:
    """`multiply_panel` of rows and a panel of one type, by the matrix unit if `has_tiles`."""
    if has_tiles:
        multiply_tiles(rows, row_bytes, num_rows, panel, num_words, sums, adds, ahead)
    else:
        multiply_panel(like, like, rows, row_bytes, num_rows, panel, num_words, sums, adds, ahead)


@compiled_fastmath
def multiply_panel(
    one: Any,
    other: Any,
    rows: int,
    row_bytes: int,
    num_rows: int,
    panel: int,
    num_words: int,
    sums: int,
    adds: int,
    ahead: int,
) -> None:
    """Products of rows with a panel; `one` is the element type of rows, `other` that of the panel. See `tile`."""
    for row in range(0, num_rows, ROWS):
        x, y, last = rows + row * row_bytes, sums + 4 * PANEL * row, min(num_rows - row, ROWS) - 1
        if last >= 4:
            _all(one, other, x, row_bytes, last, panel, num_words, y, adds, ahead)
        elif last:
            _four(one, other, x, row_bytes, last, panel, num_words, y, adds, ahead)
        else:
            _one(one, other, x, row_bytes, 0, panel, num_words, y, adds, ahead)
        ahead = panel


@compiled
def _add_remainder(rows: Any, weight: Any, sums: Any, start: int) -> None:
    """Add the products of the features from `start` on, which do not fill a tile; one after another, since LLVM would
    choose another order for another caller."""
    for row in range(len(rows)):
        for lane in range(len(weight)):
            total = np.float32(0)
            for k in range(start, rows.shape[1]):
                total += widened(rows[row, k]) * widened(weight[lane, k])
            sums[row, lane] += total
