"""`quantized_linear` in Triton for the few rows of a decoding step: the weight is read once, in int8 or int4.

Numbers become the dtype of the input in registers and go through tensor cores, several chunks of a row of the weight at
once, each within a group; the scales multiply the sums of a chunk. Where a weight has few rows, several programs share
the features, and a second kernel adds their sums in order. How the features are divided follows from the weight alone,
so an output depends on its own row alone.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import device_description, launch_grid, quotient_up, row_block

# Rows of the weight and of the input that a program takes at most.
_OUTPUTS, _ROWS = 32, 16
# The features of a step, of int8 or of int4, the most of a chunk, and the part of a device's programs that is wanted.
_STEP, _CHUNK, _FRACTION = {8: 512, 4: 512}, {8: 64, 4: 128}, 0.25
_WARPS, _STAGES = 4, 3


def quantized_linear(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    result: Tensor = _multiply(input, quantized, scales, bias)
    return result


@triton_op("kitforge::quantized_linear")
def _multiply(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    (num_rows, num_features), num_outputs, groups = rows.shape, len(quantized), scales.shape[1]
    output = torch.empty(num_rows, num_outputs, dtype=input.dtype, device=input.device)
    shift = None if bias is None else bias.contiguous()
    if output.numel():
        is_half, bits = input.element_size() == 2, 4 if quantized.dtype == torch.uint8 else 8
        # A chunk lies within a group; with one group for all, the rest of the last chunk is masked. A product on tensor
        # cores needs 16 features, of int4 16 pairs.
        chunk = _CHUNK[bits] if groups == 1 else math.gcd(num_features // groups, _CHUNK[bits])
        chunks = max(_STEP[bits] // chunk, 1) if is_half else 4
        chunk = chunk if is_half else min(chunk, 32)
        steps = quotient_up(num_features, chunk * chunks)
        row_tile = min(max(row_block(num_rows), 8), _ROWS if is_half else 8)
        output_tiles, row_tiles = quotient_up(num_outputs, _OUTPUTS), quotient_up(num_rows, row_tile)
        wanted = int(device_description(input.device).num_programs * _FRACTION) // output_tiles
        span = quotient_up(steps, min(max(wanted, 1), steps)) * chunk * chunks
        splits = quotient_up(num_features, span)
        sums = output
        if splits > 1:
            sums = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=input.device)
        launch_grid(
            *(_multiply_kernel, row_tiles * output_tiles * splits, _OUTPUTS),
            *(rows, quantized.contiguous(), scales.contiguous(), shift if splits == 1 else None, sums),
            *(num_rows, num_outputs, num_features, groups, row_tiles, output_tiles, span),
            num_warps=_WARPS if is_half else 8,
            num_stages=_STAGES,
            is_queued=True,
            ROWS=row_tile,
            CHUNKS=chunks,
            CHUNK=chunk,
            IS_INT4=bits == 4,
            # Instructions for pairs of numbers of two bytes.
            PAIRED=is_half and input.device.type == "cuda",
            # The interpreter multiplies bfloat16 as integers.
            WIDEN=input.device.type == "cpu" and input.dtype == torch.bfloat16,
        )
        if splits > 1:
            tiles = quotient_up(output.numel(), 512)
            more = output.numel(), num_outputs, splits
            launch_grid(_sum_kernel, tiles, 512, output, sums, shift, *more, is_queued=True)
    return output.view(*input.shape[:-1], num_outputs)


_multiply.register_fake(lambda input, quantized, *_: input.new_empty(*input.shape[:-1], quantized.shape[0]))


@triton.jit
def _unpack(packed, like, PAIRED: tl.constexpr):
    """The numbers of the lower and of the upper halves of bytes, in the dtype of `like`."""
    if PAIRED and like == tl.bfloat16:
        # 128 + n has n in its lowest bits.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, one, least;
            mov.b32 one, 0x3f803f80; mov.b32 least, 0xc308c308;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.b32 c, a, 4; shr.b32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; lop3.b32 b, b, 0x000f000f, 0x43004300, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea; lop3.b32 d, d, 0x000f000f, 0x43004300, 0xea;
            fma.rn.bf16x2 $0, a, one, least; fma.rn.bf16x2 $1, b, one, least;
            fma.rn.bf16x2 $2, c, one, least; fma.rn.bf16x2 $3, d, one, least; }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    if PAIRED and like == tl.float16:
        # 1024 + n has n in its lowest bits.
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, d, one, least;
            mov.b32 one, 0x3c003c00; mov.b32 least, 0xe408e408;
            prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342;
            shr.b32 c, a, 4; shr.b32 d, b, 4;
            lop3.b32 a, a, 0x000f000f, 0x64006400, 0xea; lop3.b32 b, b, 0x000f000f, 0x64006400, 0xea;
            lop3.b32 c, c, 0x000f000f, 0x64006400, 0xea; lop3.b32 d, d, 0x000f000f, 0x64006400, 0xea;
            fma.rn.f16x2 $0, a, one, least; fma.rn.f16x2 $1, b, one, least;
            fma.rn.f16x2 $2, c, one, least; fma.rn.f16x2 $3, d, one, least; }""",
            "=&r,=&r,=&r,=&r,r",
            [packed],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    return ((packed & 15).to(tl.float32) - 8).to(like), ((packed >> 4).to(tl.float32) - 8).to(like)


@triton.jit
def _load_scales(scales, outputs, is_output, start, groups, num_features, CHUNKS: tl.constexpr, CHUNK: tl.constexpr):
    """The scale of each chunk from feature `start` on, of each output: [chunks, outputs]."""
    group = (start + tl.arange(0, CHUNKS) * CHUNK) // (num_features // groups)
    known = is_output[None, :] & (group < groups)[:, None]
    return tl.load(scales + outputs[None, :] * groups + group[:, None], mask=known, other=0)


@triton.jit
def _multiply_kernel(
    input,
    quantized,
    scales,
    bias,
    output,
    num_rows,
    num_outputs,
    num_features,
    groups,
    row_tiles,
    output_tiles,
    span,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_INT4: tl.constexpr,
    PAIRED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    width: tl.constexpr = CHUNKS * CHUNK
    like: tl.constexpr = EXACT if WIDEN else input.dtype.element_ty
    for step in range(steps):
        tile = tl.program_id(0) + step * tl.num_programs(0)
        # Programs of the same part of the weight follow each other.
        rows = tile % row_tiles * ROWS + tl.arange(0, ROWS)
        outputs = tile // row_tiles % output_tiles * BLOCK + tl.arange(0, BLOCK)
        split = tile // (row_tiles * output_tiles)
        begin = split * span
        end = tl.minimum(begin + span, num_features)
        # A tile beyond the last one has no features and no rows.
        is_output, is_row = outputs < num_outputs, rows < tl.where(begin < end, num_rows, 0)
        long_outputs = outputs.to(tl.int64)
        lines = quantized + (long_outputs * (num_features // 2 if IS_INT4 else num_features))[:, None]
        total = tl.zeros((CHUNKS, BLOCK, ROWS), EXACT)
        scale = _load_scales(scales, long_outputs, is_output, begin, groups, num_features, CHUNKS, CHUNK)
        for start in range(begin, end, width):
            features = start + tl.arange(0, width)
            inside = is_row[:, None] & (features < end)[None, :]
            offsets = rows.to(tl.int64)[:, None] * num_features + features[None, :]
            x = tl.load(input + offsets, mask=inside, other=0).to(like)
            if IS_INT4:
                pairs = start // 2 + tl.arange(0, width // 2)
                inside = is_output[:, None] & (pairs < end // 2)[None, :]
                # What is not there becomes -8 and is multiplied by 0.
                low, high = _unpack(tl.load(lines + pairs[None, :], mask=inside, other=0), like, PAIRED)
                low = tl.permute(tl.reshape(low, (BLOCK, CHUNKS, CHUNK // 2)), (1, 0, 2))
                high = tl.permute(tl.reshape(high, (BLOCK, CHUNKS, CHUNK // 2)), (1, 0, 2))
                even, odd = tl.split(tl.reshape(x, (ROWS, CHUNKS, CHUNK // 2, 2)))
                product = tl.dot(low, tl.permute(even, (1, 2, 0)), input_precision="ieee")
                product += tl.dot(high, tl.permute(odd, (1, 2, 0)), input_precision="ieee")
            else:
                inside = is_output[:, None] & (features < end)[None, :]
                whole = tl.load(lines + features[None, :], mask=inside, other=0).to(like)
                whole = tl.permute(tl.reshape(whole, (BLOCK, CHUNKS, CHUNK)), (1, 0, 2))
                x = tl.permute(tl.reshape(x, (ROWS, CHUNKS, CHUNK)), (1, 2, 0))
                product = tl.dot(whole, x, input_precision="ieee")
            if groups > 1:
                total += product * scale.to(EXACT)[:, :, None]
                # Of the next step, so that nothing waits for them.
                following = start + width
                scale = _load_scales(scales, long_outputs, is_output, following, groups, num_features, CHUNKS, CHUNK)
            else:
                total += product
        result = tl.sum(total, 0)
        if groups == 1:
            result *= tl.load(scales + outputs, mask=is_output, other=0).to(EXACT)[:, None]
        if bias is not None:
            result += tl.load(bias + outputs, mask=is_output, other=0).to(EXACT)[:, None]
        offsets = (split * num_rows + rows).to(tl.int64)[None, :] * num_outputs + outputs[:, None]
        tl.store(output + offsets, result.to(output.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit
def _sum_kernel(output, sums, bias, count, num_outputs, splits, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < count
        total = tl.zeros((BLOCK,), tl.float32)
        part = sums + offsets
        for _ in range(splits):
            total += tl.load(part, mask=inside, other=0)
            part += count
        if bias is not None:
            total += tl.load(bias + offsets % num_outputs, mask=inside, other=0).to(tl.float32)
        tl.store(output + offsets, total.to(output.dtype.element_ty), mask=inside)
