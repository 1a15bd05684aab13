"""`fused_decode_step` in Triton: five launches a block, for up to 16 tokens over a paged cache.

1. norm, query, key and value, QK-norm, rotation, and the write to the cache; 2. `paged_attention`; 3. output projection
and residual addition; 4. norm, gate and up, activation; 5. down projection and residual addition. Norms behind a branch
(GLM-4) are a launch more. For a norm the programs before it leave the moments of the features that they wrote, so that
no program reads the whole stream twice.

A program takes some outputs over all features, 16 rows at a time: fewer are repeated, so that each row has the bits
that it has among others. It loads its first tile of weights before it waits for the kernel before it (`dependent`).
Half precision is rounded where the modules round. It ran in Triton's interpreter and was compiled, on no device so far.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.fused_decode_step.reference import Angles, BlockWeights, DecoderWeights, Locations, Slabs
from kitforge.core.kernels.paged_attention.triton import attend_pages
from kitforge.core.kernels.triton.dependent import await_last, dependent_launch
from kitforge.core.kernels.triton.gated import sigmoid
from kitforge.core.kernels.triton.runtime import device_description, launch_grid, quotient_up, row_block

# Rows of a product on tensor cores.
_LANES = tl.constexpr(16)
# Outputs of a program, and pairs of outputs of a head, of whose parts only a norm of the head makes one.
_OUTPUTS, _PAIRS = tl.constexpr(16), 8
# Elements of the tiles of weights that a program loads at once, in those of a device's tile; without tensor cores the
# features of a tile are in registers.
_TILES = {2: 2, 4: 0.25}
_WARPS = 4


class TritonDecodeStep:
    """See `DecodeStepFactory` and `DecodeStepKernel`. Takes steps with block tables, without adapters, of few tokens;
    the result of another one is None."""

    def __init__(self, weights: DecoderWeights, slabs: Slabs) -> None:
        self._weights, self._slabs = weights, slabs

    def __call__(
        self, stream: Tensor, rotary: Angles | None, locations: Locations, *, rereads: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        del rereads  # weights are read in place
        weights, num_rows = self._weights, len(stream)
        if locations.tables is None or locations.adapters is not None or num_rows > _LANES.value:
            return None
        step = _Step(weights, stream)
        for index, (layer, slabs) in enumerate(zip(weights.layers, self._slabs, strict=True)):
            rotation = weights.rotations[index]
            angles = (None, None) if rotary is None or rotation is None else (rotary[0][rotation], rotary[1][rotation])
            query = step.heads(layer, slabs, angles, locations.slots)
            mixed = attend_pages(
                *(query, *slabs, locations.tables, locations.lengths, weights.slopes, locations.block_size),
                *(weights.windows[index] or 0, weights.scales[index]),
                dependent_launch(stream.device),
            )
            step.add(
                mixed.flatten(1), layer.out, layer.out_bias, layer.attention_out_norm, layer.attention_out_norm_bias
            )
            inner = step.inner(layer)
            step.add(inner, layer.down, layer.down_bias, layer.mlp_out_norm, layer.mlp_out_norm_bias)
        hidden, logits = step.logits()
        return hidden, logits if len(locations.rows) == num_rows else logits[locations.rows]


class _Step:
    """The launches of a step over a stream [tokens, dim], of which it has a copy."""

    def __init__(self, weights: DecoderWeights, stream: Tensor) -> None:
        self._weights, self._stream = weights, torch.empty_like(stream, memory_format=torch.contiguous_format)
        self._parts = row_block(quotient_up(stream.shape[1], _OUTPUTS.value))
        # Of the features that a program writes: their sum, and that of squared distances from their mean, or from 0.
        self._moments = stream.new_empty(2, _LANES.value, self._parts, dtype=torch.float32)
        self._has_mean = weights.norm_bias is not None
        self._join(stream.contiguous(), None, None, None)

    def _join(self, stream: Tensor, branch: Tensor | None, gain: Tensor | None, shift: Tensor | None) -> None:
        """Write a stream, with the norm of a branch if there is one, and its moments."""
        num_rows, dim = self._stream.shape
        launch_grid(
            *(_join_kernel, num_rows, _OUTPUTS.value * self._parts),
            *(stream, branch, gain, shift, self._stream, self._moments, num_rows, dim, self._weights.norm_eps),
            num_warps=_WARPS,
            is_queued=True,
            HAS_MEAN=self._has_mean,
            # What is before the first kernel is not ours.
            **({"PDL": False} if branch is None else dependent_launch(self._stream.device)),
        )

    def heads(
        self, layer: BlockWeights, slabs: tuple[Tensor, Tensor], angles: tuple[Tensor | None, ...], slots: Tensor
    ) -> Tensor:
        """The queries [tokens, heads, head_dim]; keys and values are written to their slots."""
        weights, num_rows, (keys, values) = self._weights, len(self._stream), slabs
        head_dim, num_kv_heads = weights.head_dim, keys.shape[1]
        num_heads = layer.query.shape[0] // head_dim
        output = self._stream.new_empty(num_rows, num_heads, head_dim)
        pairs = quotient_up(head_dim, 2)
        block = _PAIRS if layer.query_norm is None else max(row_block(pairs), _PAIRS)
        self._launch(
            *(_heads_kernel, (num_heads + 2 * num_kv_heads) * quotient_up(pairs, block), block, 2 * block),
            *(self._stream, layer.query, layer.key, layer.value, layer.query_bias, layer.key_bias, layer.value_bias),
            *(layer.query_norm, layer.key_norm, layer.attention_norm, layer.attention_norm_bias, self._moments),
            *(*angles, slots, output, keys, values, num_rows, self._stream.shape[1], num_heads),
            *(num_kv_heads, head_dim, 0 if angles[0] is None else angles[0].shape[1]),
            *(weights.norm_eps, weights.qk_norm_eps),
            INTERLEAVED=weights.interleaved_rotary,
        )
        return output

    def add(self, input: Tensor, weight: Any, bias: Tensor | None, *norm: Tensor | None) -> None:
        """Add the output of a linear layer to the stream, or the norm of it."""
        if norm[0] is None:
            self._multiply(input, (weight, None), (bias, None), self._stream, adds=True)
        else:
            branch = torch.empty_like(self._stream)
            self._multiply(input, (weight, None), (bias, None), branch)
            self._join(self._stream, branch, *norm)

    def inner(self, layer: BlockWeights) -> Tensor:
        """The activations [tokens, mlp_dim] of the MLP."""
        output = self._stream.new_empty(len(self._stream), layer.up.shape[0])
        layers, norm = (layer.up, layer.gate), (layer.mlp_norm, layer.mlp_norm_bias)
        self._multiply(self._stream, layers, (layer.up_bias, layer.gate_bias), output, norm, activates=True)
        return output

    def logits(self) -> tuple[Tensor, Tensor]:
        """The normalized output, and logits in fp32."""
        weights, hidden = self._weights, torch.empty_like(self._stream)
        output = self._stream.new_empty(len(hidden), weights.head.shape[0], dtype=torch.float32)
        norm = weights.norm, weights.norm_bias
        self._multiply(self._stream, (weights.head, None), (None, None), output, norm, hidden=hidden)
        return hidden, output

    def _multiply(
        self,
        input: Tensor,
        weights: tuple[Any, Any],
        biases: tuple[Tensor | None, Tensor | None],
        output: Tensor,
        norm: tuple[Tensor | None, Tensor | None] = (None, None),
        *,
        adds: bool = False,
        activates: bool = False,
        hidden: Tensor | None = None,
    ) -> None:
        num_outputs, count = weights[0].shape
        # The features of a tile of the stream take registers too, with all of a head's norm.
        block = _OUTPUTS.value if hidden is None else 2 * _OUTPUTS.value
        self._launch(
            *(_product_kernel, quotient_up(num_outputs, block), block, block if weights[1] is None else 2 * block),
            *(input, *weights, *biases, *norm, self._moments, output, hidden),
            *(len(input), num_outputs, count, self._weights.norm_eps),
            ADDS=adds,
            ACTIVATES=activates,
            HAS_GELU=weights[1] is None or self._weights.gate == "gelu",
        )

    def _launch(self, kernel: Any, tiles: int, block: int, outputs: int, *arguments: Any, **constants: Any) -> None:
        """Run a kernel over tiles of so many outputs."""
        stream = self._stream
        elements = int(device_description(stream.device).tile_elements * _TILES[stream.element_size()])
        launch_grid(
            kernel,
            tiles,
            block,
            *arguments,
            num_warps=_WARPS,
            is_queued=True,
            ROWS=row_block(len(stream)),
            TILE=max(elements // row_block(outputs), _LANES.value),
            PARTS=self._parts,
            HAS_MEAN=self._has_mean,
            # The interpreter multiplies bfloat16 as integers.
            WIDEN=stream.device.type == "cpu" and stream.dtype == torch.bfloat16,
            **constants,
            **dependent_launch(stream.device),
        )


@triton.jit
def _normalize(x, mean, scale, gain, shift, columns, is_column, EXACT: tl.constexpr):
    """The norm of some features, rounded to the dtype of the gain before that multiplies it, as in the reference."""
    factors = tl.load(gain + columns, mask=is_column, other=0)
    normal = (x - mean) * scale
    if shift is not None:
        return normal * factors.to(EXACT) + tl.load(shift + columns, mask=is_column, other=0).to(EXACT)
    return normal.to(factors.dtype).to(EXACT) * factors.to(EXACT)


@triton.jit
def _join_kernel(
    stream,
    branch,
    gain,
    shift,
    output,
    moments,
    num_rows,
    dim,
    eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    PDL: tl.constexpr,
):
    await_last(PDL)
    num_parts: tl.constexpr = BLOCK // _OUTPUTS
    columns, parts = tl.arange(0, BLOCK), tl.arange(0, num_parts)
    for step in range(steps):
        row = tl.program_id(0) + step * tl.num_programs(0)
        # A row beyond the last one has no features.
        inside = columns < tl.where(row < num_rows, dim, 0)
        x = tl.load(stream + row * dim + columns, mask=inside, other=0).to(EXACT)
        if branch is not None:
            y = tl.load(branch + row * dim + columns, mask=inside, other=0).to(EXACT)
            mean = tl.sum(y, 0) / dim if HAS_MEAN else 0.0
            centered = tl.where(inside, y - mean, 0)
            scale = 1 / tl.sqrt(tl.sum(centered * centered, 0) / dim + eps)
            y = _normalize(y, mean, scale, gain, shift, columns, columns < dim, EXACT)
            x = (x + y.to(branch.dtype.element_ty).to(EXACT)).to(output.dtype.element_ty).to(EXACT)
        tl.store(output + row * dim + columns, x.to(output.dtype.element_ty), mask=inside)
        x = tl.reshape(tl.where(inside, x, 0), (num_parts, _OUTPUTS))
        is_part = parts * _OUTPUTS < tl.where(row < num_rows, dim, 0)
        _write_moments(x, moments + row * num_parts + parts, parts, is_part, dim, num_parts, HAS_MEAN)


@triton.jit
def _write_moments(x, targets, parts, is_written, count, PARTS: tl.constexpr, HAS_MEAN: tl.constexpr):
    """Those of the columns of x, of so many parts of `count` features."""
    if HAS_MEAN:
        total, size = tl.sum(x, 1), tl.minimum(count - parts * _OUTPUTS, _OUTPUTS)
        tl.store(targets, total, mask=is_written)
        is_feature = tl.arange(0, _OUTPUTS)[None, :] < tl.expand_dims(size, -1)
        x = tl.where(is_feature, x - (total / size)[:, None], 0)
    tl.store(targets + _LANES * PARTS, tl.sum(x * x, 1), mask=is_written)


@triton.jit
def _moments_of(moments, num_rows, count, eps, ROWS: tl.constexpr, PARTS: tl.constexpr, HAS_MEAN: tl.constexpr):
    """The mean of each row, 0 for RMSNorm, and the reciprocal of its deviation, by moments of parts (Chan et al.)."""
    lanes, parts = tl.arange(0, _LANES), tl.arange(0, PARTS)
    rows = lanes // (_LANES // ROWS)
    inside = (rows < num_rows)[:, None] & (parts * _OUTPUTS < count)[None, :]
    at = moments + rows[:, None] * PARTS + parts[None, :]
    squares = tl.load(at + _LANES * PARTS, mask=inside, other=0)
    mean = tl.zeros((_LANES,), squares.dtype)
    if HAS_MEAN:
        totals, sizes = tl.load(at, mask=inside, other=0), tl.minimum(count - parts * _OUTPUTS, _OUTPUTS)[None, :]
        mean = tl.sum(totals, 1) / count
        distance = tl.where(inside, totals / sizes - mean[:, None], 0)
        squares += distance * distance * sizes
    scale = 1 / tl.sqrt(tl.sum(squares, 1) / count + eps)
    return _first_copies(mean, ROWS), _first_copies(scale, ROWS)


@triton.jit
def _first_copies(lanes, ROWS: tl.constexpr):
    """Of each row the first of its lanes [16]: [ROWS, 1]."""
    copies: tl.constexpr = _LANES // ROWS
    is_first = tl.arange(0, copies)[None, :] == 0
    return tl.sum(tl.where(is_first, tl.reshape(lanes, (ROWS, copies)), 0), 1)[:, None]


@triton.jit
def _multiply(x, weight, total, ROWS: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr):
    """Add x [ROWS, TILE], each row as often as there is room, times weight [outputs, TILE] to total [16, outputs]."""
    if WIDEN:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    lanes = tl.broadcast_to(x[:, None, :], (ROWS, _LANES // ROWS, TILE))
    return tl.dot(tl.reshape(lanes, (_LANES, TILE)), tl.trans(weight), total, input_precision="ieee")


@triton.jit
def _products(
    input,
    lines,
    others,
    is_line,
    is_other,
    gain,
    shift,
    moments,
    hidden,
    num_rows,
    count,
    eps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
    HAS_OTHERS: tl.constexpr,
):
    """Input [rows, count], with a gain its norm, times the weights whose lines begin at the addresses `lines` and
    `others` [outputs]: [16, outputs] in fp32 each. The norm is written to `hidden`, if that is given."""
    columns, rows = tl.arange(0, TILE), tl.arange(0, ROWS)[:, None]
    total, other_total = tl.zeros((_LANES, BLOCK), EXACT), tl.zeros((_LANES, BLOCK), EXACT)
    lines, others = lines[:, None] + columns[None, :], others[:, None] + columns[None, :]
    is_line, is_other = is_line[:, None], is_other[:, None]
    weight = tl.load(lines, mask=is_line & (columns < count)[None, :], other=0)
    other = weight
    if HAS_OTHERS:
        other = tl.load(others, mask=is_other & (columns < count)[None, :], other=0)
    await_last(PDL)
    if gain is not None:
        mean, scale = _moments_of(moments, num_rows, count, eps, ROWS, PARTS, HAS_MEAN)
    for start in range(0, count, TILE):
        feature = start + columns[None, :]
        inside = (rows < num_rows) & (feature < count)
        x = tl.load(input + rows * count + feature, mask=inside, other=0)
        if gain is not None:
            x = _normalize(x.to(EXACT), mean, scale, gain, shift, feature, feature < count, EXACT).to(weight.dtype)
            if hidden is not None and tl.program_id(0) == 0:
                tl.store(hidden + rows * count + feature, x, mask=inside)
        total = _multiply(x, weight, total, ROWS, TILE, WIDEN)
        if HAS_OTHERS:
            other_total = _multiply(x, other, other_total, ROWS, TILE, WIDEN)
        following = start + TILE
        is_ahead = (following + columns < count)[None, :]
        weight = tl.load(lines + following, mask=is_line & is_ahead, other=0)
        if HAS_OTHERS:
            other = tl.load(others + following, mask=is_other & is_ahead, other=0)
    return total, other_total


@triton.jit
def _rounded(total, bias, outputs, is_output, like: tl.constexpr):
    """With the bias, as the linear layer returns it, in fp32."""
    if bias is not None:
        total += tl.load(bias + outputs, mask=is_output, other=0).to(total.dtype)[None, :]
    return total.to(like).to(total.dtype)


@triton.jit
def _product_kernel(
    input,
    weight,
    gate,
    bias,
    gate_bias,
    gain,
    shift,
    moments,
    output,
    hidden,
    num_rows,
    num_outputs,
    count,
    eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    WIDEN: tl.constexpr,
    ADDS: tl.constexpr,
    ACTIVATES: tl.constexpr,
    HAS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    like: tl.constexpr = weight.dtype.element_ty
    lanes = tl.arange(0, _LANES)
    rows = lanes // (_LANES // ROWS)
    is_row = (rows < num_rows) & (lanes % (_LANES // ROWS) == 0)
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        outputs = tile * BLOCK + tl.arange(0, BLOCK)
        is_output, begins = outputs < num_outputs, outputs.to(tl.int64) * count
        others = weight + begins
        if gate is not None:
            others = gate + begins
        total, other = _products(
            *(input, weight + begins, others, is_output, is_output, gain, shift, moments, hidden),
            *(num_rows, count, eps, BLOCK, EXACT, ROWS, TILE, PARTS, HAS_MEAN, WIDEN, PDL),
            gate is not None,
        )
        result = _rounded(total, bias, outputs, is_output, like)
        if ACTIVATES:
            if gate is not None:
                other = _rounded(other, gate_bias, outputs, is_output, like)
                result *= (other * sigmoid(other, HAS_GELU)).to(like).to(EXACT)
            else:
                result *= sigmoid(result, HAS_GELU)
        inside = is_row[:, None] & is_output[None, :]
        offsets = rows[:, None] * num_outputs + outputs[None, :]
        if ADDS:
            result += tl.load(output + offsets, mask=inside, other=0).to(EXACT)
            result = tl.where(inside, result, 0).to(like).to(EXACT)
            is_part = is_row & (rows < tl.where(tile * BLOCK < num_outputs, num_rows, 0))
            targets = moments + rows * PARTS + tile
            _write_moments(result, targets, tile + rows * 0, is_part, num_outputs, PARTS, HAS_MEAN)
        tl.store(output + offsets, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _heads_kernel(
    input,
    query_weight,
    key_weight,
    value_weight,
    query_bias,
    key_bias,
    value_bias,
    query_norm,
    key_norm,
    gain,
    shift,
    moments,
    cos,
    sin,
    slots,
    query,
    keys,
    values,
    num_rows,
    count,
    num_heads,
    num_kv_heads,
    head_dim,
    num_pairs,
    eps,
    qk_eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    WIDEN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    like: tl.constexpr = query_weight.dtype.element_ty
    lanes = tl.arange(0, _LANES)
    rows = lanes // (_LANES // ROWS)
    is_row = (rows < num_rows) & (lanes % (_LANES // ROWS) == 0)
    parts = tl.cdiv(tl.cdiv(head_dim, 2), BLOCK)
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        head, pair = tile // parts, tile % parts * BLOCK + tl.arange(0, BLOCK)
        is_key, is_value = head >= num_heads, head >= num_heads + num_kv_heads
        width = tl.where(head < num_heads + 2 * num_kv_heads, head_dim, 0)
        own, weight, bias, norm = head, query_weight, query_bias, query_norm
        target, line = query, rows.to(tl.int64) * num_heads
        if is_key:
            own, weight, bias, norm = head - num_heads, key_weight, key_bias, key_norm
            target = keys
        if is_value:
            own, weight, bias = head - num_heads - num_kv_heads, value_weight, value_bias
            target = values
        # The features of a pair, turned together; what is left is paired as it comes.
        one, two = 2 * pair, 2 * pair + 1
        if not INTERLEAVED:
            one, two = tl.where(pair < num_pairs, pair, one), tl.where(pair < num_pairs, pair + num_pairs, two)
        is_one, is_two = one < width, two < width
        ones, twos = own * head_dim + one, own * head_dim + two
        total, other = _products(
            *(input, weight + ones.to(tl.int64) * count, weight + twos.to(tl.int64) * count, is_one, is_two),
            *(gain, shift, moments, None, num_rows, count, eps),
            *(BLOCK, EXACT, ROWS, TILE, PARTS, HAS_MEAN, WIDEN, PDL, True),
        )
        x, y = _rounded(total, bias, ones, is_one, like), _rounded(other, bias, twos, is_two, like)
        if query_norm is not None:
            scale = (1 / tl.sqrt(tl.sum(x * x + y * y, 1) / head_dim + qk_eps))[:, None]
            # The values are left as they are.
            normal_x = _normalize(x, 0.0, scale, norm, None, one[None, :], is_one[None, :], EXACT)
            normal_y = _normalize(y, 0.0, scale, norm, None, two[None, :], is_two[None, :], EXACT)
            x = tl.where(is_value, x, normal_x.to(like).to(EXACT))
            y = tl.where(is_value, y, normal_y.to(like).to(EXACT))
        if cos is not None:
            turned = is_row[:, None] & (pair < tl.where(is_value, 0, num_pairs))[None, :]
            at = rows[:, None] * num_pairs + pair[None, :]
            c = tl.load(cos + at, mask=turned, other=1).to(EXACT)
            s = tl.load(sin + at, mask=turned, other=0).to(EXACT)
            x, y = tl.where(turned, x * c - y * s, x), tl.where(turned, y * c + x * s, y)
        if is_key:
            line = tl.load(slots + rows, mask=is_row, other=0) * num_kv_heads
        begins = target + (line * head_dim)[:, None]
        tl.store(begins + ones[None, :], x.to(like), mask=is_row[:, None] & is_one[None, :])
        tl.store(begins + twos[None, :], y.to(like), mask=is_row[:, None] & is_two[None, :])
