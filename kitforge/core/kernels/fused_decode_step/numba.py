"""`fused_decode_step` in one compiled call, since single operations between the products cost more than their work.

Threads share each phase of a layer and wait for one another after it (`spin_barrier`). The bits of a token depend
neither on the number of threads nor on the tokens beside it: products and attention sum in a fixed order, and all else
is computed row by row, in vectors of a fixed width. Half precision is rounded where the network of modules rounds.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL
from kitforge.core.kernels.cpu_engine.matrix_microkernel import release
from kitforge.core.kernels.cpu_engine.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled_fastmath,
    int64_at,
    run_on_threads,
)
from kitforge.core.kernels.cpu_engine.spin_barrier import BYTES_PER_PHASE, ThreadAutotuner, barrier, finish, next_chunk
from kitforge.core.kernels.cpu_engine.threads import num_threads, single_thread
from kitforge.core.kernels.decode_attention.numba import Slabs, attend, attention_scratch, slot_of
from kitforge.core.kernels.fused_decode_step.low_rank import RUN_ROWS, add_updates, reduce_runs, runs_of, table_of
from kitforge.core.kernels.fused_decode_step.reference import (
    LINEARS,
    BlockWeights,
    DecoderWeights,
    Locations,
    quantized_weights,
    rounded_weights,
)
from kitforge.core.kernels.fused_decode_step.rows import activate_row, add_row, normalize_row, rotate_row, write_row
from kitforge.core.kernels.linear.numba import (
    LINE,
    aligned,
    empty_lines,
    multiply,
    packed_size,
    prefers_matrix_unit,
    scratch_size,
)
from kitforge.core.kernels.quantized_linear.numba import layout_of, multiply_quantized, pack_blocks
from kitforge.core.kernels.quantized_linear.reference import Blocks
from kitforge.foundation import device as devices

# Multiplications of a step that are worth a second thread.
GRAIN = 2**23
# With more tokens, all threads are faster than one; with fewer, that is measured.
MANY_TOKENS = 16
# Of each linear layer, with fewer tokens.
NUM_CHUNKS = 8
# Rows that are multiplied with a panel at a time: few enough for their sums to stay in the L1 cache.
BLOCK_ROWS = RUN_ROWS
# Chunks of the tokens of a phase that only norms or writes.
TOKEN_CHUNKS = 32
# Query rows of a tile of attention, and their scores, at most.
TILE_ROWS, TILE_SCORES = 48, 2**18
# Of free memory, how much panels of weights may take.
KEPT_PART = 0.25
# Phases of a layer with adapters, and phases before and after all layers.
_PHASES, _ENDS = 12, 3


class NumbaDecodeStep:
    """See `DecodeStepFactory` and `DecodeStepKernel`.

    Where memory allows, the panels that the first step packs are kept for those that follow, with the same bits: for a
    few rows, packing takes as long as multiplying. A step that rereads the weights packs them again, if not quantized.
    """

    def __init__(self, weights: DecoderWeights, slabs: list[tuple[Tensor, Tensor]]) -> None:
        exact = quantized_weights(weights)
        self._dtype = slabs[0][0].dtype
        self._has_tiles = self._dtype is not torch.float32 and prefers_matrix_unit()
        weights = rounded_weights(exact, self._dtype)
        self._copies = [pair for pair in zip(_tensors(weights), _tensors(exact), strict=True) if pair[0] is not pair[1]]
        branch_dtype = weights.norm.dtype if weights.has_exact_norms else self._dtype
        self._norm_types = _TYPES[branch_dtype], _TYPES[weights.norm.dtype]
        self._autotuner = ThreadAutotuner()
        self._options = weights.norm_eps, weights.qk_norm_eps, weights.interleaved_rotary, weights.gate == "gelu"
        matrices = [[getattr(layer, name) for name in LINEARS] for layer in weights.layers] + [[weights.head]]
        blocks = [each for layer in matrices for each in layer if isinstance(each, Blocks)]
        self._quantized, starts = pack_blocks(blocks, self._dtype.itemsize, self._has_tiles)
        packed = {id(each): start for each, start in zip(blocks, starts, strict=True)}
        self._are_kept, panels = False, self._panels(matrices)
        layouts = [[layout_of(each) if isinstance(each, Blocks) else 0 for each in layer] for layer in matrices]

        def address(each: Tensor | Blocks | None) -> int:
            return packed[id(each)] if isinstance(each, Blocks) else 0 if each is None else each.data_ptr()

        self._updates, self._max_rank, factors = table_of(weights)
        width = self._updates[0, 0].nbytes
        tensors = [[*layer.tensors(), *pair] for layer, pair in zip(weights.layers, slabs, strict=True)]
        self._table = np.array(
            [
                [
                    *map(address, row),
                    *panels[n],
                    *layouts[n],
                    *(self._updates[n].ctypes.data + width * np.arange(_NUM_LINEARS)),
                ]
                for n, row in enumerate(tensors)
            ]
        )
        ends = weights.norm, weights.norm_bias, weights.head, None
        self._ends = np.array([*map(address, ends), *panels[-1], *layouts[-1]])
        # Tensors that are read by address must stay alive; quantized ones are packed.
        self._keepalive = [each for layer in (*tensors, ends, factors) for each in layer if isinstance(each, Tensor)]
        self._scales = np.array(weights.scales, dtype=np.float32)
        self._windows = np.array([window or 0 for window in weights.windows])
        self._rotations = np.array([-1 if each is None else each for each in weights.rotations])
        self._num_weights = sum(math.prod(each.shape) for layer in matrices[:-1] for each in layer if each is not None)
        first, (vocab, dim) = weights.layers[0], weights.head.shape
        num_heads, num_kv_heads = (each.shape[0] // weights.head_dim for each in (first.query, first.key))
        self._sizes = dim, num_heads, num_kv_heads, weights.head_dim, first.up.shape[0], vocab
        self._slopes = torch.zeros(num_heads) if weights.slopes is None else weights.slopes.float().contiguous()

    def _panels(self, matrices: list[list[Tensor | Blocks | None]]) -> list[list[int]]:
        """Addresses of the panels of each layer's `LINEARS`, and of the head's, that are kept; else 0."""
        sizes = [[packed_size(each) if isinstance(each, Tensor) else 0 for each in layer] for layer in matrices]
        total = sum(map(sum, sizes))
        if total > KEPT_PART * devices.free_host_memory():
            total, sizes = 0, [[0] * len(layer) for layer in sizes]
        self._kept = empty_lines(total)
        addresses = itertools.accumulate(itertools.chain(*sizes), initial=self._kept.data_ptr())
        return [[next(addresses) * (size > 0) for size in layer] for layer in sizes]

    def panels(self) -> Tensor:
        """The bytes of the panels that are kept."""
        return self._kept

    def __call__(
        self, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, locations: Locations, *, rereads: bool = False
    ) -> tuple[Tensor, Tensor]:
        if rereads:
            for rounded, weight in self._copies:
                rounded.copy_(weight)
        num_tokens, rows = len(stream), locations.rows
        dim, num_heads, num_kv_heads, head_dim, mlp_dim, vocab = self._sizes
        with single_thread():
            own = torch.empty(stream.shape).copy_(stream)
        angles = [each.contiguous() for each in rotary or (own, own)]
        hidden, logits = torch.empty(stream.shape, dtype=self._dtype), torch.empty(len(rows), vocab)
        tiles, is_decode = self._tiles(locations)
        logit_rows = np.full(num_tokens, -1)
        logit_rows[rows.numpy()] = np.arange(len(rows))
        runs = runs_of(locations.adapters)
        reduced = _NUM_LINEARS * self._max_rank * (len(runs) > 0)
        widths = [dim, *[num_heads * head_dim] * 2, *[num_kv_heads * head_dim] * 2, mlp_dim, dim, reduced]
        # Each begins at a cache line.
        ends = list(itertools.accumulate((num_tokens * width + 15) // 16 * 64 for width in widths))
        scratch = torch.empty(ends[-1] // 4 + 16)
        first = -(-scratch.data_ptr() // LINE) * LINE
        counts = torch.zeros((_PHASES * len(self._table) + _ENDS) * BYTES_PER_PHASE // 8, dtype=torch.long)
        tensors = own, *angles, locations.starts, locations.lengths, hidden, logits, self._slopes
        step = _Step(
            _TYPES[self._dtype],
            _TYPES[stream.dtype],
            self._norm_types[0],
            self._norm_types[1],
            self._has_tiles,
            *self._options,
            rereads or not self._are_kept,
            # Without panels that are kept, each block would pack or dequantize its own.
            max(num_tokens, 1) if self._quantized.numel() or not self._kept.numel() else BLOCK_ROWS,
            is_decode,
            num_threads(),
            num_tokens,
            len(rows),
            len(tiles),
            len(runs),
            self._max_rank,
            *self._sizes,
            angles[0].shape[2] if rotary else 0,
            max(locations.lengths.tolist(), default=0),
            locations.slots.data_ptr(),
            tiles.ctypes.data,
            logit_rows.ctypes.data,
            runs.ctypes.data,
            *(each.data_ptr() for each in tensors),
            *(first + start for start in (0, *ends[:-1])),
        )
        tables = self._table, self._ends, self._scales, self._windows, self._rotations
        work = functools.partial(_run, step, *tables, counts.data_ptr())
        if num_tokens * self._num_weights < GRAIN:
            work()
        elif num_tokens < MANY_TOKENS:
            self._autotuner.call(num_tokens, work)
        else:
            run_on_threads(work, num_threads())
        self._are_kept = self._kept.numel() > 0
        return hidden, logits

    def _tiles(self, locations: Locations) -> tuple[Any, bool]:
        """The first token and the number of tokens of each tile of attention [tiles, 2], which follow one another in a
        text; and whether no tile has several."""
        starts, lengths = locations.starts.numpy(), locations.lengths.numpy()
        alone = [(row, 1) for row in range(len(starts))]
        # As in most steps; numpy takes longer to compare a few numbers.
        if len(set(starts.tolist())) == len(starts):
            return np.array(alone), True
        follows = (starts[1:] == starts[:-1]) & (lengths[1:] == lengths[:-1] + 1)
        if not follows.any():
            return np.array(alone), True
        size = max(1, min(TILE_ROWS, TILE_SCORES // int(lengths.max())) * self._sizes[2] // self._sizes[1])
        firsts = np.flatnonzero(np.concatenate([[True], ~follows]))
        runs = zip(firsts, np.append(firsts[1:], len(starts)), strict=True)
        parts = [(row, min(size, stop - row)) for first, stop in runs for row in range(first, stop, size)]
        return np.array(parts), False


def _tensors(weights: DecoderWeights) -> list[Tensor]:
    """Those of all layers, and the head; without those that are quantized."""
    everything = [each for layer in weights.layers for each in layer.tensors()] + [weights.head]
    return [each for each in everything if isinstance(each, Tensor)]


# The element types of kernels, by dtype.
_TYPES = {torch.float32: FLOAT, torch.bfloat16: HALF}
_NAMES = list(BlockWeights.__dataclass_fields__)
_QUERY, _KEY, _VALUE, _OUT = (_NAMES.index(name) for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (_NAMES.index(name) for name in ("gate", "up", "down"))
_QUERY_NORM, _KEY_NORM = _NAMES.index("query_norm"), _NAMES.index("key_norm")
_ATTENTION_NORM, _ATTENTION_OUT_NORM = _NAMES.index("attention_norm"), _NAMES.index("attention_out_norm")
_MLP_NORM, _MLP_OUT_NORM = _NAMES.index("mlp_norm"), _NAMES.index("mlp_out_norm")
_KEYS, _VALUES = len(_NAMES), len(_NAMES) + 1
_NUM_LINEARS = len(LINEARS)
_KEPT = {name: len(_NAMES) + 2 + index for index, name in enumerate(LINEARS)}
_KEPT_QUERY, _KEPT_KEY, _KEPT_VALUE, _KEPT_OUT = (_KEPT[name] for name in ("query", "key", "value", "out"))
_KEPT_GATE, _KEPT_UP, _KEPT_DOWN = (_KEPT[name] for name in ("gate", "up", "down"))


class _Step(NamedTuple):
    """Arguments of all phases: sizes, then addresses of arrays in fp32, or in the type of `like` where noted."""

    like: Any  # an element of what products read: linear layers, keys and values
    stream_like: Any  # an element of the stream
    norm_like: Any  # an element of the weights of the norms of heads and branches
    stream_norm_like: Any  # and of those of the stream
    has_tiles: bool  # products take the matrix unit
    eps: float
    qk_eps: float
    interleaved: bool
    has_gelu_gate: bool
    packs: bool  # weights, as they are now
    block: int  # rows that are multiplied with a panel at a time
    is_decode: bool  # every token is the only one of its text
    num_threads: int  # which take chunks in turn
    num_tokens: int
    num_rows: int  # whose logits are computed
    num_tiles: int
    num_runs: int  # of tokens with an adapter
    max_rank: int  # of an adapter
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab: int
    num_pairs: int
    longest: int
    slots: int  # int64 [..]
    tiles: int  # int64 [tiles, 2]
    logit_rows: int  # int64 [tokens], -1 where no logits are computed
    runs: int  # int64 [runs, 3]
    stream: int  # [tokens, dim]
    cos: int  # [rotations, tokens, pairs]
    sin: int  # [rotations, tokens, pairs]
    starts: int  # int64 [tokens]
    lengths: int  # int64 [tokens]
    normal: int  # [tokens, dim], like
    logits: int  # [rows, vocab]
    slopes: int  # [heads]
    branch: int  # [tokens, dim]
    query: int  # [tokens, heads, head_dim]
    mixed: int  # [tokens, heads, head_dim], like
    key: int  # [tokens, kv_heads, head_dim]
    value: int  # [tokens, kv_heads, head_dim]
    inner: int  # [tokens, mlp_dim], like
    chosen: int  # [rows, dim], like
    reduced: int  # [`LINEARS`, tokens, max_rank], like


@compiled_fastmath
def _run(step: Any, table: Any, ends: Any, scales: Any, windows: Any, rotations: Any, phase: int) -> None:
    """Run all layers on one thread, or on several that share the chunks. Rows of the table are `BlockWeights`."""
    width, kv_width, last = step.num_heads * step.head_dim, step.num_kv_heads * step.head_dim, len(table) - 1
    heads = step.num_heads, step.num_kv_heads, step.head_dim, step.has_tiles
    slabs = Slabs(heads[0], heads[1], heads[2], heads[3], 0, 0, step.slots, step.slopes)
    widest = max(max(step.dim, step.max_rank), max(width, step.mlp_dim))
    size = max(scratch_size(step.block, widest) + 4 * PANEL * RUN_ROWS, _attention_bytes(step, slabs))
    # A panel of outputs of two layers for a block of rows, fp32.
    pair = 8 * PANEL * step.block
    memory = np.empty((pair + size + LINE) // 4, dtype=np.float32)
    panels = aligned(memory.ctypes.data)
    scratch = panels + pair
    phase = _join(step, ends[3:4], table[0, _ATTENTION_NORM:], phase, False)
    for layer in range(len(table)):
        row = table[layer]
        outputs = (step.query, width), (step.key, kv_width), (step.value, kv_width)
        weights = (_linear(row, _QUERY, _KEPT_QUERY), _linear(row, _KEY, _KEPT_KEY), _linear(row, _VALUE, _KEPT_VALUE))
        phase = reduce_runs(step, (step.normal, step.dim), weights, scratch, phase)
        phase = _products(step, (step.normal, step.dim), weights, outputs, scratch, phase)
        phase = _attend(step, row, windows[layer], rotations[layer], scales[layer], scratch, phase)
        out, down = _linear(row, _OUT, _KEPT_OUT), _linear(row, _DOWN, _KEPT_DOWN)
        phase = reduce_runs(step, (step.mixed, width), (out,), scratch, phase)
        phase = _product(step, (step.mixed, width), out, (step.branch, step.dim), scratch, phase, step.num_tokens)
        phase = _join(step, row[_ATTENTION_OUT_NORM:], row[_MLP_NORM:], phase, True)
        phase = _expand(step, row, panels, scratch, phase)
        inner, branch = (step.inner, step.mlp_dim), (step.branch, step.dim)
        phase = reduce_runs(step, inner, (down,), scratch, phase)
        phase = _product(step, inner, down, branch, scratch, phase, step.num_tokens)
        following = table[layer + 1, _ATTENTION_NORM:] if layer < last else ends
        phase = _join(step, row[_MLP_OUT_NORM:], following, phase, True)
    phase = _choose(step, phase)
    head, logits = (ends[2], 0, ends[4], ends[5], 0, 0), (step.logits, step.vocab)
    _product(step, (step.chosen, step.dim), head, logits, scratch, phase, step.num_rows)
    release(step.has_tiles)
    # numba frees an array after its last use, and does not know of addresses.
    memory[0] = 0


@compiled_fastmath
def _attention_bytes(step: Any, slabs: Any) -> Any:
    tiles, size = int64_at(step.tiles, (step.num_tiles, 2)), 0
    for tile in range(step.num_tiles):
        size = max(size, tiles[tile, 1])
    return attention_scratch(slabs, size, step.longest)


@compiled_fastmath
def _num_panels(num_outputs: int) -> Any:
    return (num_outputs + PANEL - 1) // PANEL


@compiled_fastmath
def _linear(row: Any, weight: int, kept: int) -> Any:
    """Addresses of a weight, its bias and its panels; its `layout_of`, 0 for one that is not quantized; the address of
    its updates, and its number."""
    number = kept - _KEPT_QUERY
    return row[weight], row[weight + 1], row[kept], row[kept + _NUM_LINEARS], row[kept + 2 * _NUM_LINEARS], number


@compiled_fastmath
def _multiply(
    step: Any,
    rows: Any,
    weights: Any,
    num_outputs: int,
    output: Any,
    panel: int,
    following: int,
    scratch: int,
    first: int,
    count: int,
) -> None:
    """A panel of the outputs of a linear layer by its `_linear` for `count` rows from the first on, with the panel that
    this thread will multiply next; rows and output are addresses and widths, that of the output where the panel and
    these rows begin."""
    like, tiled, (weight, bias, kept, layout, updates, _), features = step.like, step.has_tiles, weights, rows[1]
    begin = rows[0] + array_at(rows[0], (1,), like).itemsize * features * first
    if layout:
        multiply_quantized(
            like, tiled, layout, begin, weight, bias, output, count, num_outputs, features, panel, scratch
        )
    else:
        # The rows after the first block find the panel packed and in the caches.
        packs, then = step.packs and first == 0, panel if first else following
        multiply(
            like, tiled, begin, weight, bias, kept, packs, output, count, num_outputs, features, panel, then, scratch
        )
    if updates and step.num_runs:
        add_updates(step, weights, num_outputs, (output[0], output[1], panel), (first, count), scratch)


@compiled_fastmath
def _multiply_all(
    step: Any,
    rows: Any,
    weights: Any,
    num_outputs: int,
    output: Any,
    panel: int,
    following: int,
    scratch: int,
    num_rows: int,
) -> None:
    """`_multiply` for all rows, in blocks whose sums stay in the caches until they are written. Without rows a panel is
    packed all the same, for the calls that read it; one that is quantized is packed already."""
    for first in range(0, num_rows if weights[3] else max(num_rows, 1), step.block):
        columns, count = (output[0] + 4 * output[1] * first, output[1]), min(step.block, num_rows - first)
        _multiply(step, rows, weights, num_outputs, columns, panel, following, scratch, first, count)


@compiled_fastmath
def _num_chunks(step: Any, num_panels: int) -> Any:
    """A panel of few rows takes hardly longer than a thread takes to get it, so that threads share them by chunks."""
    return min(num_panels, NUM_CHUNKS) if step.num_tokens < MANY_TOKENS else num_panels


@compiled_fastmath
def _panels_of(step: Any, num_panels: int, num_chunks: int, chunk: int) -> Any:
    """The first panel of a chunk, the one behind its last, and the first of the chunk that this thread takes next."""
    first, stop = num_panels * chunk // num_chunks, num_panels * (chunk + 1) // num_chunks
    return first, stop, num_panels * (chunk + step.num_threads) // num_chunks


@compiled_fastmath
def _product(step: Any, rows: Any, weights: Any, output: Any, scratch: int, phase: int, num_rows: int) -> Any:
    num_panels = _num_panels(output[1])
    num_chunks = _num_chunks(step, num_panels)
    chunk = next_chunk(phase)
    while chunk < num_chunks:
        start, stop, then = _panels_of(step, num_panels, num_chunks, chunk)
        for panel in range(start, stop):
            columns, following = output[0] + 4 * PANEL * panel, panel + 1 if panel + 1 < stop else then
            _multiply_all(step, rows, weights, output[1], (columns, output[1]), panel, following, scratch, num_rows)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def _products(step: Any, rows: Any, weights: Any, outputs: Any, scratch: int, phase: int) -> Any:
    """Three linear layers of the same rows; the last two have as many outputs."""
    first, second = _num_panels(outputs[0][1]), _num_panels(outputs[1][1])
    num_panels = first + 2 * second
    num_chunks = _num_chunks(step, num_panels)
    chunk = next_chunk(phase)
    while chunk < num_chunks:
        start, stop, then = _panels_of(step, num_panels, num_chunks, chunk)
        for panel in range(start, stop):
            which = 0 if panel < first else 1 if panel < first + second else 2
            base, output = (0, first, first + second)[which], outputs[which]
            own, following = panel - base, (panel + 1 if panel + 1 < stop else then) - base
            columns = output[0] + 4 * PANEL * own, output[1]
            _multiply_all(step, rows, weights[which], output[1], columns, own, following, scratch, step.num_tokens)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def _attend(step: Any, row: Any, window: int, rotation: int, scale: Any, scratch: int, phase: int) -> Any:
    """Write the new keys and values, and attend, tile by tile and for each key head."""
    num_tokens, num_kv_heads = step.num_tokens, step.num_kv_heads
    shape = step.num_heads, num_kv_heads, step.head_dim, step.has_tiles
    slabs = Slabs(shape[0], shape[1], shape[2], shape[3], row[_KEYS], row[_VALUES], step.slots, step.slopes)
    tiles = int64_at(step.tiles, (step.num_tiles, 2))
    starts, lengths = int64_at(step.starts, (num_tokens,)), int64_at(step.lengths, (num_tokens,))
    width, itemsize = step.num_heads * step.head_dim, array_at(step.mixed, (1,), step.like).itemsize
    if not step.is_decode:
        # A token sees keys that other threads write.
        num_chunks, chunk = min(TOKEN_CHUNKS, num_tokens), next_chunk(phase)
        while chunk < num_chunks:
            for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
                for kv_head in range(num_kv_heads):
                    _write_key(step, slabs, row, rotation, token, kv_head)
            chunk = finish(phase)
        phase = barrier(phase, num_chunks)
    # Of many texts, a thread takes all key heads: those of a position lie beside one another.
    heads = num_kv_heads if step.num_tiles >= MANY_TOKENS else 1
    num_chunks, chunk = step.num_tiles * num_kv_heads // heads, next_chunk(phase)
    while chunk < num_chunks:
        for each in range(heads * chunk, heads * (chunk + 1)):
            tile, kv_head = each // num_kv_heads, each % num_kv_heads
            first, count = tiles[tile]
            if step.is_decode:
                _write_key(step, slabs, row, rotation, first, kv_head)
            for token in range(first, first + count):
                _turn_queries(step, row, rotation, token, kv_head)
            tokens = step.query + 4 * width * first, step.mixed + itemsize * width * first
            position = lengths[first] - 1
            attend(step.like, slabs, tokens, starts[first], position, count, kv_head, window, scale, scratch)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def _angles(step: Any, rotation: int, token: int) -> Any:
    """Addresses of the cosines and sines of a token, and their number; none where the layer has no rotary positions."""
    start = 4 * (max(rotation, 0) * step.num_tokens + token) * step.num_pairs
    return step.cos + start, step.sin + start, step.num_pairs if rotation >= 0 else 0


@compiled_fastmath
def _turn_queries(step: Any, row: Any, rotation: int, token: int, kv_head: int) -> None:
    """Normalize and rotate the queries of a token that share a key head, in place."""
    group, angles = step.num_heads // step.num_kv_heads, _angles(step, rotation, token)
    for head in range(kv_head * group, kv_head * group + group):
        query = step.query + 4 * step.head_dim * (token * step.num_heads + head)
        _turn(step, query, row[_QUERY_NORM], angles)


@compiled_fastmath
def _turn(step: Any, address: int, norm: int, angles: Any) -> None:
    """Normalize a head if there is a norm, then rotate it by its `_angles`; in place."""
    cos, sin, num_pairs = angles
    if norm:
        normalize_row(address, step.head_dim, (step.like, step.norm_like), norm, 0, step.qk_eps)
    rotate_row(address, step.like, cos, sin, num_pairs, step.interleaved)


@compiled_fastmath
def _write_key(step: Any, slabs: Any, row: Any, rotation: int, token: int, kv_head: int) -> None:
    """Normalize and rotate a key of a token, and write it and its value to the cache."""
    offset, shape = 4 * step.head_dim * (token * step.num_kv_heads + kv_head), (step.num_tokens,)
    key, value = step.key + offset, step.value + offset
    start, length = int64_at(step.starts, shape)[token], int64_at(step.lengths, shape)[token]
    slot, itemsize = slot_of(slabs, start, length - 1), array_at(slabs.keys, (1,), step.like).itemsize
    offset = (slot * step.num_kv_heads + kv_head) * step.head_dim * itemsize
    _turn(step, key, row[_KEY_NORM], _angles(step, rotation, token))
    write_row(key, slabs.keys + offset, step.like, step.head_dim)
    write_row(value, slabs.values + offset, step.like, step.head_dim)


@compiled_fastmath
def _expand(step: Any, row: Any, panels: int, scratch: int, phase: int) -> Any:
    """The hidden layer of the MLP, panel by panel; `panels` is memory for two of a block of rows."""
    num_panels, rows, has_gate = _num_panels(step.mlp_dim), (step.normal, step.dim), row[_GATE] != 0
    up, gate = _linear(row, _UP, _KEPT_UP), _linear(row, _GATE, _KEPT_GATE)
    ups, gates = (panels, PANEL), (panels + 4 * PANEL * step.block, PANEL)
    num_chunks = _num_chunks(step, num_panels)
    phase = reduce_runs(step, rows, (gate, up), scratch, phase)
    chunk = next_chunk(phase)
    while chunk < num_chunks:
        start, stop, then = _panels_of(step, num_panels, num_chunks, chunk)
        for panel in range(start, stop):
            following = panel + 1 if panel + 1 < stop else then
            for first in range(0, step.num_tokens, step.block):
                count = min(step.block, step.num_tokens - first)
                _multiply(step, rows, up, step.mlp_dim, ups, panel, following, scratch, first, count)
                if has_gate:
                    _multiply(step, rows, gate, step.mlp_dim, gates, panel, following, scratch, first, count)
                _activate(step, has_gate, ups[0], gates[0], PANEL * panel, first, count)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def _activate(step: Any, has_gate: bool, ups: int, gates: int, start: int, first: int, count: int) -> None:
    """The activation of panels [count, `PANEL`], written from token `first` and column `start` on."""
    like, width = step.like, min(PANEL, step.mlp_dim - start)
    itemsize = array_at(step.inner, (1,), like).itemsize
    for token in range(count):
        target, row = step.inner + itemsize * (step.mlp_dim * (first + token) + start), 4 * PANEL * token
        activate_row(like, ups + row, gates + row if has_gate else 0, step.has_gelu_gate, target, width)


@compiled_fastmath
def _join(step: Any, out_norm: Any, norm: Any, phase: int, has_branch: bool) -> Any:
    """Add the branches, normalized if they have a norm, to the streams, and normalize these for the next branch."""
    num_tokens, num_chunks, chunk = step.num_tokens, min(TOKEN_CHUNKS, step.num_tokens), next_chunk(phase)
    while chunk < num_chunks:
        for token in range(num_tokens * chunk // num_chunks, num_tokens * (chunk + 1) // num_chunks):
            _join_token(step, out_norm, norm, token, has_branch)
        chunk = finish(phase)
    return barrier(phase, num_chunks)


@compiled_fastmath
def _join_token(step: Any, out_norm: Any, norm: Any, token: int, has_branch: bool) -> None:
    like, dim = step.like, step.dim
    itemsize = array_at(step.normal, (1,), like).itemsize
    stream, branch = step.stream + 4 * dim * token, step.branch + 4 * dim * token
    if has_branch:
        if out_norm[0]:
            normalize_row(branch, dim, (like, step.norm_like), out_norm[0], out_norm[1], step.eps)
        add_row(stream, branch, dim, step.stream_like)
    else:
        write_row(stream, branch, np.float32(0), dim)
    normalize_row(branch, dim, (step.stream_like, step.stream_norm_like), norm[0], norm[1], step.eps)
    write_row(branch, step.normal + itemsize * dim * token, like, dim)


@compiled_fastmath
def _choose(step: Any, phase: int) -> Any:
    """Copy the normalized tokens whose logits are computed."""
    normals = array_at(step.normal, (step.num_tokens, step.dim), step.like)
    chosen, rows = (
        array_at(step.chosen, (step.num_rows, step.dim), step.like),
        int64_at(step.logit_rows, (step.num_tokens,)),
    )
    if next_chunk(phase) == 0:
        for token in range(step.num_tokens):
            if rows[token] >= 0:
                chosen[rows[token]] = normals[token]
        finish(phase)
    return barrier(phase, 1)
