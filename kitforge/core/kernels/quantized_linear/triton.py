"""`quantized_linear` in Triton for the few rows of a decoding step: the weight is read once, in int8 or int4.

Numbers become the dtype of the input in registers and go through tensor cores; scales multiply the products of a group.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_ops import triton_op
from kitforge.core.kernels.triton_runtime import device_description, launch_grid, row_block

# The shortest sides of a tile of a product on tensor cores.
_LEAST = 16
_OUTPUTS = 32


def quantized_linear(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `QuantizedLinearKernel`."""
    result: Tensor = _multiply(input, quantized, scales, bias)
    return result


@triton_op("kitforge::quantized_linear")
def _multiply(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1]).contiguous()
    (num_rows, num_features), num_outputs = rows.shape, len(quantized)
    output = torch.empty(num_rows, num_outputs, dtype=input.dtype, device=input.device)
    if output.numel():
        # A step of the loop lies within a group; with one group for all, the rest of the last step is masked.
        group = num_features // scales.shape[1]
        widest = max(device_description(input.device).tile_elements // _OUTPUTS // input.element_size(), 2 * _LEAST)
        features = min(widest, row_block(group)) if scales.shape[1] == 1 else math.gcd(group, widest)
        # More rows spill registers.
        row_tile = min(max(row_block(num_rows), _LEAST), 32 if input.element_size() == 2 else _LEAST)
        outputs_tiles = triton.cdiv(num_outputs, _OUTPUTS)
        launch_grid(
            *(_multiply_kernel, triton.cdiv(num_rows, row_tile) * outputs_tiles, _OUTPUTS),
            *(rows, quantized.contiguous(), scales.contiguous(), bias, output),
            *(num_rows, num_outputs, num_features, group, scales.shape[1], outputs_tiles),
            num_warps=4,
            ROWS=row_tile,
            FEATURES=max(features, 2 * _LEAST),
            IS_INT4=quantized.dtype == torch.uint8,
            HAS_BIAS=bias is not None,
            # The interpreter multiplies bfloat16 as integers.
            WIDEN=input.device.type == "cpu" and input.dtype == torch.bfloat16,
        )
    return output.view(*input.shape[:-1], num_outputs)


_multiply.register_fake(lambda input, quantized, *_: input.new_empty(*input.shape[:-1], quantized.shape[0]))


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
    group,
    groups,
    output_tiles,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    IS_INT4: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        outputs = tile % output_tiles * BLOCK + tl.arange(0, BLOCK)
        rows = tile // output_tiles * ROWS + tl.arange(0, ROWS)
        is_output, is_row = outputs < num_outputs, rows < num_rows
        total = tl.zeros((ROWS, BLOCK), EXACT)
        for start in range(0, num_features, FEATURES):
            scale = tl.load(scales + outputs * groups + start // group, mask=is_output, other=0).to(EXACT)
            if IS_INT4:
                pairs = start // 2 + tl.arange(0, FEATURES // 2)
                is_pair = pairs < num_features // 2
                offsets = outputs[:, None] * (num_features // 2) + pairs[None, :]
                packed = tl.load(quantized + offsets, mask=is_output[:, None] & is_pair[None, :], other=136)
                offsets = rows[:, None] * num_features + 2 * pairs[None, :]
                inside = is_row[:, None] & is_pair[None, :]
                even = tl.load(input + offsets, mask=inside, other=0)
                odd = tl.load(input + offsets + 1, mask=inside, other=0)
                if WIDEN:
                    even, odd = even.to(EXACT), odd.to(EXACT)
                low = ((packed & 15).to(tl.float32) - 8).to(even.dtype)
                high = ((packed >> 4).to(tl.float32) - 8).to(even.dtype)
                product = tl.dot(even, tl.trans(low), input_precision="ieee")
                product += tl.dot(odd, tl.trans(high), input_precision="ieee")
            else:
                features = start + tl.arange(0, FEATURES)
                is_feature = features < num_features
                offsets = outputs[:, None] * num_features + features[None, :]
                whole = tl.load(quantized + offsets, mask=is_output[:, None] & is_feature[None, :], other=0)
                offsets = rows[:, None] * num_features + features[None, :]
                x = tl.load(input + offsets, mask=is_row[:, None] & is_feature[None, :], other=0)
                if WIDEN:
                    x = x.to(EXACT)
                product = tl.dot(x, tl.trans(whole.to(tl.float32).to(x.dtype)), input_precision="ieee")
            total += product * scale[None, :]
        if HAS_BIAS:
            total += tl.load(bias + outputs, mask=is_output, other=0).to(EXACT)[None, :]
        offsets = rows[:, None] * num_outputs + outputs[None, :]
        tl.store(output + offsets, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])
