"""Weight-only int8 and int4 for the compiled step of a decoder: panels of whole numbers, widened while they are read.

The whole numbers are exact in bfloat16, so the products are those of `linear` with the dequantized weight; scales
multiply the sums of a row, or of a group of `GROUP` features, in fp32. Activations stay as they are, so an output
depends on its own row alone.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.linear.gemm_microkernel import PANEL
from kitforge.core.kernels.linear.numba import PANEL_WORDS, add_products, write_sums
from kitforge.core.kernels.numba_runtime import array_at, compiled_fastmath, float32_at, truncated
from kitforge.core.kernels.quantized_linear.reference import GROUP, quantize

_BYTE: Any = np.uint8(0)
_SIGNED: Any = np.int8(0)
_ZERO = 8


def packed(weight: Tensor, bits: Literal[4, 8]) -> Tensor:
    """A weight [out, in] as bytes [panels, ..]: of each panel the scales [groups, `PANEL`], then its words in order; in
    int4 two words in one, the second in the upper half. `in` must be a multiple of `GROUP`."""
    (num_outputs, num_features), per_word = weight.shape, 4 // weight.element_size()
    whole, scales = quantize(weight, 8 if bits == 8 else 4, None if bits == 8 else GROUP)
    if bits == 4:
        whole = torch.stack((whole & 15, whole >> 4), dim=2).flatten(1).to(torch.int8) - _ZERO
    num_panels = -(-num_outputs // PANEL)
    missing = num_panels * PANEL - num_outputs
    whole = torch.cat([whole, whole.new_zeros(missing, num_features)])
    scales = torch.cat([scales, scales.new_zeros(missing, scales.shape[1])])
    words = whole.view(num_panels, PANEL, num_features // per_word, per_word).transpose(1, 2).flatten(2)
    if bits == 4:
        halves = (words + _ZERO).to(torch.uint8)
        words = halves[:, ::2] | halves[:, 1::2] << 4
    factors = scales.float().view(num_panels, PANEL, -1).transpose(1, 2).contiguous()
    return torch.cat([factors.flatten(1).view(torch.uint8), words.flatten(1).view(torch.uint8)], dim=1)


@compiled_fastmath
def multiply_quantized(
    like: Any,
    has_tiles: bool,
    bits: int,
    rows: int,
    weight: int,
    bias: int,
    output: Any,
    num_rows: int,
    num_outputs: int,
    num_features: int,
    panel: int,
    scratch: int,
) -> None:
    """`linear.numba.multiply` with a `packed` weight of 8 or 4 bits."""
    group = num_features if bits == 8 else GROUP
    num_groups, per_word = num_features // group, 4 // array_at(rows, (1,), like).itemsize
    address = weight + panel * PANEL * (4 * num_groups + num_features * bits // 8)
    scales, numbers = float32_at(address, (num_groups, PANEL)), address + 4 * PANEL * num_groups
    words = scratch + 8 * PANEL
    totals = words + 4 * PANEL * PANEL_WORDS
    sums = totals + 4 * PANEL * num_rows
    total, part = float32_at(totals, (num_rows, PANEL)), float32_at(sums, (num_rows, PANEL))
    for each in range(num_groups):
        begin, end = each * group // per_word, (each + 1) * group // per_word
        for first in range(begin, end, PANEL_WORDS):
            count = min(PANEL_WORDS, end - first)
            _widen(like, bits, numbers + PANEL * per_word * first * bits // 8, count * per_word * PANEL, words)
            add_products(like, has_tiles, rows, num_rows, num_features, first, count, words, sums, first - begin, words)
        for row in range(num_rows):
            if each == 0:
                for lane in range(PANEL):
                    total[row, lane] = part[row, lane] * scales[0, lane]
            else:
                for lane in range(PANEL):
                    total[row, lane] += part[row, lane] * scales[each, lane]
    write_sums(like, totals, bias, output, num_rows, num_outputs, PANEL * panel)


@compiled_fastmath
def _widen(like: Any, bits: int, numbers: int, count: int, words: int) -> None:
    """Write `count` whole numbers to a panel in the type of `like`."""
    panel = array_at(words, (count,), like)
    if bits == 8:
        source = array_at(numbers, (count,), _SIGNED)
        for k in range(count):
            panel[k] = truncated(np.float32(source[k]), like)
        return
    itemsize, zero = panel.itemsize, np.float32(_ZERO)
    width = PANEL * (4 // itemsize)
    for first in range(0, count, 2 * width):
        # Arrays of their own, since an index that is a sum is checked for its sign and not vectorized.
        pairs = array_at(numbers + first // 2, (width,), _BYTE)
        lower, upper = (
            array_at(words + itemsize * first, (width,), like),
            array_at(words + itemsize * (first + width), (width,), like),
        )
        for k in range(width):
            # Numbers of 8 bits become fp32 at once, those of 64 bits, in which numba computes, one by one.
            lower[k] = truncated(np.float32(np.uint8(pairs[k] & 15)) - zero, like)
        for k in range(width):
            upper[k] = truncated(np.float32(np.uint8(pairs[k] >> 4)) - zero, like)
