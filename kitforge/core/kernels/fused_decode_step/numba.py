"""`fused_decode_step` in one compiled call, since single operations between the products cost more than their work.

Threads share each phase of a layer and wait for one another after it (`spin_barrier`). Bits do not depend on the number
of threads. Half precision is rounded at the same points as in the network of modules.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.decode_attention.numba import attend
from kitforge.core.kernels.fused_decode_step.reference import BlockWeights, DecoderWeights
from kitforge.core.kernels.linear.numba import multiply
from kitforge.core.kernels.numba_runtime import (
    FLOAT,
    HALF,
    array_at,
    compiled_fastmath,
    exponential,
    float32_at,
    int64_at,
    narrowed,
    rounded,
    widened,
)
from kitforge.core.kernels.spin_barrier import BYTES_PER_PHASE, ThreadAutotuner, barrier, finish, next_chunk

# Chunks of a product: enough to balance two threads of different speed.
NUM_CHUNKS = 8
# Multiplications of a step that are worth a second thread.
GRAIN = 2**23
# Phases of a layer, and phases before and after all layers.
_PHASES, _ENDS = 7, 2


@final
class NumbaDecodeStep:
    """See `DecodeStepKernel`; for contiguous weights and slabs of one dtype, fp32 or bfloat16, on CPU."""

    def __init__(self, weights: DecoderWeights, slabs: list[tuple[Tensor, Tensor]]) -> None:
        layers = [[*layer.tensors(), *pair] for layer, pair in zip(weights.layers, slabs, strict=True)]
        num_heads = len(weights.layers[0].query) // weights.head_dim
        slopes = torch.zeros(num_heads) if weights.slopes is None else weights.slopes.float().contiguous()
        # Tensors that are read by address must stay alive.
        self._keepalive = weights, slabs
        self._slopes = slopes
        self._dtype = weights.head.dtype
        self._autotuner = ThreadAutotuner()
        self._options = weights.norm_eps, weights.qk_norm_eps, weights.interleaved_rotary, weights.gate == "gelu"
        self._table = np.array([[_address(each) for each in layer] for layer in layers])
        self._ends = np.array([_address(each) for each in (weights.norm, weights.norm_bias, weights.head, None)])
        self._scales = np.array(weights.scales, dtype=np.float32)
        self._windows = np.array([window or 0 for window in weights.windows])
        self._rotations = np.array([-1 if each is None else each for each in weights.rotations])
        self._num_weights = sum(
            each.numel() for layer in weights.layers for each in layer.tensors() if each is not None
        )
        (vocab, dim), first = weights.head.shape, weights.layers[0]
        num_kv_heads = len(first.key) // weights.head_dim
        self._sizes = dim, num_heads, num_kv_heads, weights.head_dim, len(first.up), vocab, len(slabs[0][0])

    def __call__(
        self, stream: Tensor, rotary: tuple[Tensor, Tensor] | None, starts: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `DecodeStepKernel`."""
        num_sequences = len(stream)
        dim, num_heads, num_kv_heads, head_dim, mlp_dim, vocab, num_slots = self._sizes
        own = torch.empty(stream.shape).copy_(stream)
        angles = [each.contiguous() for each in rotary or (own, own)]
        hidden, logits = torch.empty(stream.shape, dtype=self._dtype), torch.empty(num_sequences, vocab)
        widths = [dim, *[num_heads * head_dim] * 3, *[num_kv_heads * head_dim] * 2, *[mlp_dim] * 3]
        # Each begins at a cache line.
        ends = list(itertools.accumulate((num_sequences * width + 15) // 16 * 64 for width in widths))
        scratch = torch.empty(ends[-1] // 4)
        counts = torch.zeros((_PHASES * len(self._table) + _ENDS) * BYTES_PER_PHASE // 8, dtype=torch.long)
        is_large = num_sequences * self._num_weights >= GRAIN
        step = _Step(
            FLOAT if self._dtype is torch.float32 else HALF,
            *self._options,
            num_sequences,
            *self._sizes,
            angles[0].shape[2] if rotary else 0,
            NUM_CHUNKS if is_large else 1,
            *(each.data_ptr() for each in (own, *angles, starts, lengths, hidden, logits, self._slopes)),
            *(scratch.data_ptr() + start for start in (0, *ends[:-1])),
        )
        tables = self._table, self._ends, self._scales, self._windows, self._rotations
        work = functools.partial(_run, step, *tables, counts.data_ptr())
        if is_large:
            self._autotuner.call(num_sequences, work)
        else:
            work()
        return hidden, logits


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_NAMES = list(BlockWeights.__dataclass_fields__)
_QUERY, _KEY, _VALUE, _OUT = (_NAMES.index(name) for name in ("query", "key", "value", "out"))
_GATE, _UP, _DOWN = (_NAMES.index(name) for name in ("gate", "up", "down"))
_QUERY_NORM, _KEY_NORM = _NAMES.index("query_norm"), _NAMES.index("key_norm")
_ATTENTION_NORM, _ATTENTION_OUT_NORM = _NAMES.index("attention_norm"), _NAMES.index("attention_out_norm")
_MLP_NORM, _MLP_OUT_NORM = _NAMES.index("mlp_norm"), _NAMES.index("mlp_out_norm")
_KEYS, _VALUES = len(_NAMES), len(_NAMES) + 1


class _Step(NamedTuple):
    """Arguments of all phases: sizes, then addresses of arrays in fp32, or in the dtype of the weights where noted."""

    like: Any
    eps: float
    qk_eps: float
    interleaved: bool
    has_gelu_gate: bool
    num_sequences: int
    dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    vocab: int
    num_slots: int
    num_pairs: int
    num_chunks: int
    stream: int  # [sequences, dim]
    cos: int  # [rotations, sequences, pairs]
    sin: int  # [rotations, sequences, pairs]
    starts: int  # int64 [sequences]
    lengths: int  # int64 [sequences]
    normal: int  # [sequences, dim], like weights
    logits: int  # [sequences, vocab]
    slopes: int  # [heads]
    branch: int  # [sequences, dim]
    query: int  # [sequences, heads, head_dim]
    exact: int  # [sequences, heads, head_dim]
    mixed: int  # [sequences, heads, head_dim], like weights
    key: int  # [sequences, kv_heads, head_dim]
    value: int  # [sequences, kv_heads, head_dim]
    gate: int  # [sequences, mlp_dim]
    up: int  # [sequences, mlp_dim]
    inner: int  # [sequences, mlp_dim], like weights


@compiled_fastmath
def _run(step: Any, table: Any, ends: Any, scales: Any, windows: Any, rotations: Any, phase: int) -> None:
    """Run all layers on one thread, or on several that share the chunks. Rows of the table are `BlockWeights`."""
    width, last = step.num_heads * step.head_dim, len(table) - 1
    phase = _join(step, ends[3:], table[0, _ATTENTION_NORM:], phase, False)
    for layer in range(len(table)):
        row = table[layer]
        phase = _project(step, row, phase)
        phase = _attend(step, row, windows[layer], rotations[layer], scales[layer], phase)
        phase = _product(step, step.mixed, width, row[_OUT:], step.branch, step.dim, phase)
        phase = _join(step, row[_ATTENTION_OUT_NORM:], row[_MLP_NORM:], phase, True)
        phase = _expand(step, row, phase)
        phase = _product(step, step.inner, step.mlp_dim, row[_DOWN:], step.branch, step.dim, phase)
        following = table[layer + 1, _ATTENTION_NORM:] if layer < last else ends
        phase = _join(step, row[_MLP_OUT_NORM:], following, phase, True)
    _product(step, step.normal, step.dim, ends[2:], step.logits, step.vocab, phase)


@compiled_fastmath
def _multiply(step: Any, rows: int, num_features: int, weights: Any, output: int, num_outputs: int, chunk: int) -> None:
    """One chunk of the outputs of a linear layer, whose weight and bias come first in `weights`."""
    start, stop = num_outputs * chunk // step.num_chunks, num_outputs * (chunk + 1) // step.num_chunks
    multiply(
        step.like, rows, weights[0], weights[1], output, step.num_sequences, num_outputs, num_features, start, stop
    )
    result = float32_at(output, (step.num_sequences, num_outputs))
    for row in range(step.num_sequences):
        for column in range(start, stop):
            result[row, column] = rounded(result[row, column], step.like)


@compiled_fastmath
def _product(step: Any, rows: int, num_features: int, weights: Any, output: int, num_outputs: int, phase: int) -> Any:
    chunk = next_chunk(phase)
    while chunk < step.num_chunks:
        _multiply(step, rows, num_features, weights, output, num_outputs, chunk)
        chunk = finish(phase)
    return barrier(phase, step.num_chunks)


@compiled_fastmath
def _project(step: Any, row: Any, phase: int) -> Any:
    """Queries, keys and values."""
    width, kv_width = step.num_heads * step.head_dim, step.num_kv_heads * step.head_dim
    chunk = next_chunk(phase)
    while chunk < step.num_chunks:
        _multiply(step, step.normal, step.dim, row[_QUERY:], step.query, width, chunk)
        _multiply(step, step.normal, step.dim, row[_KEY:], step.key, kv_width, chunk)
        _multiply(step, step.normal, step.dim, row[_VALUE:], step.value, kv_width, chunk)
        chunk = finish(phase)
    return barrier(phase, step.num_chunks)


@compiled_fastmath
def _attend(step: Any, row: Any, window: int, rotation: int, scale: Any, phase: int) -> Any:
    """Attention from queries, keys and values, sequence by sequence; writes the new keys and values."""
    like, num_sequences = step.like, step.num_sequences
    heads, kv_heads = (num_sequences, step.num_heads, step.head_dim), (num_sequences, step.num_kv_heads, step.head_dim)
    query, key, value = float32_at(step.query, heads), float32_at(step.key, kv_heads), float32_at(step.value, kv_heads)
    exact, mixed = float32_at(step.exact, heads), array_at(step.mixed, heads, like)
    # No pairs where the layer has no rotary positions.
    pairs = num_sequences, step.num_pairs if rotation >= 0 else 0
    start = 4 * max(rotation, 0) * num_sequences * step.num_pairs
    cos, sin = float32_at(step.cos + start, pairs), float32_at(step.sin + start, pairs)
    starts, lengths = int64_at(step.starts, (num_sequences,)), int64_at(step.lengths, (num_sequences,))
    slopes = float32_at(step.slopes, (step.num_heads,))
    slab = step.num_slots, step.num_kv_heads, step.head_dim
    keys, values = array_at(row[_KEYS], slab, like), array_at(row[_VALUES], slab, like)
    sequence = next_chunk(phase)
    while sequence < num_sequences:
        slot, one = starts[sequence] + lengths[sequence] - 1, slice(sequence, sequence + 1)
        _rotate(step, query[sequence], row[_QUERY_NORM], cos[sequence], sin[sequence])
        _rotate(step, key[sequence], row[_KEY_NORM], cos[sequence], sin[sequence])
        _write(key[sequence], keys[slot], like)
        _write(value[sequence], values[slot], like)
        attend(query[one], keys, values, starts[one], lengths[one], slopes, exact[one], window, scale)
        _write(exact[sequence], mixed[sequence], like)
        sequence = finish(phase)
    return barrier(phase, num_sequences)


@compiled_fastmath
def _expand(step: Any, row: Any, phase: int) -> Any:
    """The hidden layer of the MLP."""
    chunk = next_chunk(phase)
    while chunk < step.num_chunks:
        _multiply(step, step.normal, step.dim, row[_UP:], step.up, step.mlp_dim, chunk)
        if row[_GATE]:
            _multiply(step, step.normal, step.dim, row[_GATE:], step.gate, step.mlp_dim, chunk)
        start, stop = step.mlp_dim * chunk // step.num_chunks, step.mlp_dim * (chunk + 1) // step.num_chunks
        _activate(step, row[_GATE] != 0, start, stop)
        chunk = finish(phase)
    return barrier(phase, step.num_chunks)


@compiled_fastmath
def _join(step: Any, out_norm: Any, norm: Any, phase: int, has_branch: bool) -> Any:
    """Sequence by sequence: add the branch, normalized if it has a norm, to the stream, and normalize the stream for
    the next branch."""
    like, num_sequences, dim = step.like, step.num_sequences, step.dim
    shape = num_sequences, dim
    streams, branches, normals = (
        float32_at(step.stream, shape),
        float32_at(step.branch, shape),
        array_at(step.normal, shape, like),
    )
    sequence = next_chunk(phase)
    while sequence < num_sequences:
        stream, branch, normal = streams[sequence], branches[sequence], normals[sequence]
        if has_branch:
            if out_norm[0]:
                _normalise(branch, like, out_norm[0], out_norm[1], step.eps)
            for k in range(dim):
                stream[k] = rounded(stream[k] + branch[k], like)
        for k in range(dim):
            branch[k] = stream[k]
        _normalise(branch, like, norm[0], norm[1], step.eps)
        for k in range(dim):
            normal[k] = narrowed(branch[k], like)
        sequence = finish(phase)
    return barrier(phase, num_sequences)


@compiled_fastmath
def _write(source: Any, target: Any, like: Any) -> None:
    """Copy [heads, head_dim], rounded to the type of `like`."""
    for head in range(len(source)):
        for k in range(source.shape[1]):
            target[head, k] = narrowed(source[head, k], like)


@compiled_fastmath
def _normalise(row: Any, like: Any, weight: int, bias: int, eps: float) -> None:
    """RMSNorm or, with a bias, LayerNorm in place, by weight and bias at these addresses."""
    count, total, mean = len(row), np.float32(0), np.float32(0)
    factors, shifts = array_at(weight, (count,), like), array_at(bias, (count,), like)
    if bias:
        for k in range(count):
            mean += row[k]
        mean /= np.float32(count)
    for k in range(count):
        total += (row[k] - mean) * (row[k] - mean)
    scale = np.float32(1) / np.sqrt(total / np.float32(count) + np.float32(eps))
    if bias:
        for k in range(count):
            row[k] = rounded((row[k] - mean) * scale * widened(factors[k]) + widened(shifts[k]), like)
    else:
        for k in range(count):
            row[k] = rounded(rounded(row[k] * scale, like) * widened(factors[k]), like)


@compiled_fastmath
def _rotate(step: Any, heads: Any, norm: int, cos: Any, sin: Any) -> None:
    """Normalize heads [heads, head_dim] of a token if there is a norm, then rotate them; in place."""
    like = step.like
    stride, offset = (2, 1) if step.interleaved else (1, len(cos))
    for head in range(len(heads)):
        row = heads[head]
        if norm:
            _normalise(row, like, norm, 0, step.qk_eps)
        for pair in range(len(cos)):
            x, y = row[pair * stride], row[pair * stride + offset]
            row[pair * stride] = rounded(x * cos[pair] - y * sin[pair], like)
            row[pair * stride + offset] = rounded(y * cos[pair] + x * sin[pair], like)


_LARGEST = np.float32(88)
# Twice the coefficients of the tanh GELU.
_LINEAR, _CUBIC = np.float32(2 * 0.7978845608028654), np.float32(2 * 0.7978845608028654 * 0.044715)


@compiled_fastmath
def _gated(number: Any, power: Any) -> Any:
    """`number / (1 + e**-power)`."""
    power = -power
    return number / (np.float32(1) + exponential(_LARGEST if power > _LARGEST else power))


@compiled_fastmath
def _activate(step: Any, has_gate: bool, start: int, stop: int) -> None:
    like, shape = step.like, (step.num_sequences, step.mlp_dim)
    gate, up, inner = float32_at(step.gate, shape), float32_at(step.up, shape), array_at(step.inner, shape, like)
    for row in range(len(up)):
        if has_gate:
            for k in range(start, stop):
                x = gate[row, k]
                power = x * (_LINEAR + _CUBIC * x * x) if step.has_gelu_gate else x
                inner[row, k] = narrowed(rounded(_gated(x, power), like) * up[row, k], like)
        else:
            for k in range(start, stop):
                x = up[row, k]
                inner[row, k] = narrowed(_gated(x, x * (_LINEAR + _CUBIC * x * x)), like)
