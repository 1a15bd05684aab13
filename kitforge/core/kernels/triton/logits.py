"""Statistics and gradients of a chunk of logits in Triton, for the losses over a vocabulary.

The logits stay in the dtype of their product: one kernel reads them once for the four numbers of `merge_statistics`;
another one turns them into their gradient in place. Both are custom ops, so that torch.compile sees them.

A number that is not annotated reaches a compiled kernel in fp32, also where it computes in float64.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import launch_grid, logits_tiles


@triton_op("kitforge::logits_statistics")
def statistics(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Those of logits [rows, vocab] divided by the temperature: [4, rows], see `merge_statistics`."""
    numbers = torch.empty(4, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
    if len(logits):
        sizes = *logits.shape, targets.stride(0)
        launch_grid(_statistics_kernel, *logits_tiles(logits), *(logits, targets, numbers), *(*sizes, temperature))
    return numbers


@triton_op("kitforge::logits_gradient_", mutates_args=("logits",))
def gradient_(logits: Tensor, targets: Tensor, numbers: Tensor, temperature: float) -> None:
    """Replace logits by their gradient: (target - p) for a log-probability and -p (log p + H) for an entropy H.

    `numbers` [4, rows]: the gradients of log-probability and entropy, the entropy, and the logsumexp.
    """
    if len(logits):
        sizes = *logits.shape, targets.stride(0), numbers.stride(0)
        launch_grid(_gradient_kernel, *logits_tiles(logits), *(logits, targets, numbers), *(*sizes, temperature))


statistics.register_fake(
    lambda logits, *_: logits.new_empty(4, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
)


@triton.jit
def _statistics_kernel(
    logits,
    targets,
    numbers,
    num_rows,
    width,
    target_stride,
    temperature: tl.float64,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    divisor = tl.full((), temperature, EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        # A row beyond the last one has no columns.
        limit = tl.where(row < num_rows, width, 0)
        target = tl.load(targets + row * target_stride, mask=row < num_rows, other=-1)
        is_here = (target >= 0) & (target < width)
        source = logits + row * width
        wanted = tl.load(source + target, mask=is_here, other=0).to(EXACT)
        wanted = tl.where(is_here, wanted / divisor, float("-inf"))
        # In one pass: each block rescales the sums before it to the new maximum (Milakov, 2018).
        highest = tl.full((), float("-inf"), EXACT)
        total = tl.zeros((), EXACT)
        # The sum of exp(x - highest) * (x - highest).
        product = tl.zeros((), EXACT)
        for start in range(0, limit, BLOCK):
            inside = start + columns < limit
            x = tl.load(source + start + columns, mask=inside, other=0).to(EXACT)
            x = tl.where(inside, x / divisor, float("-inf"))
            top = tl.maximum(highest, tl.max(x, 0))
            shift = tl.where(total > 0, highest - top, 0.0)
            product = (product + total * shift) * tl.exp(shift)
            total = total * tl.exp(shift)
            below = tl.where(x == float("-inf"), x, x - top)
            weight = tl.exp(below)
            total += tl.sum(weight, 0)
            # 0 * -inf is NaN: a masked or impossible token adds nothing.
            product += tl.sum(tl.where(weight > 0, weight * below, 0.0), 0)
            highest = top
        tl.store(numbers + row, highest, mask=row < num_rows)
        tl.store(numbers + num_rows + row, total, mask=row < num_rows)
        tl.store(numbers + 2 * num_rows + row, product, mask=row < num_rows)
        tl.store(numbers + 3 * num_rows + row, wanted, mask=row < num_rows)


@triton.jit
def _gradient_kernel(
    logits,
    targets,
    numbers,
    num_rows,
    width,
    target_stride,
    stride,
    temperature: tl.float64,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    divisor = tl.full((), temperature, EXACT)
    for step in range(steps):
        row = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        limit = tl.where(row < num_rows, width, 0)
        is_row = row < num_rows
        target = tl.load(targets + row * target_stride, mask=is_row, other=-1)
        of_chosen = tl.load(numbers + row, mask=is_row, other=0)
        of_entropy = tl.load(numbers + stride + row, mask=is_row, other=0)
        entropy = tl.load(numbers + 2 * stride + row, mask=is_row, other=0)
        normalizer = tl.load(numbers + 3 * stride + row, mask=is_row, other=0)
        # Zero, not a product with zero, in rows that do not count: their logits may be NaN.
        is_counted = (of_chosen != 0) | (of_entropy != 0)
        source = logits + row * width
        for start in range(0, limit, BLOCK):
            inside = start + columns < limit
            x = tl.load(source + start + columns, mask=inside, other=0).to(EXACT)
            log_prob = x / divisor - normalizer
            probability = tl.exp(log_prob)
            slope = -of_chosen - (log_prob + entropy) * of_entropy
            gradient = tl.where(probability == 0, 0.0, probability * slope)
            gradient += tl.where(start + columns == target, of_chosen, 0.0)
            gradient = tl.where(is_counted, gradient / divisor, 0.0)
            tl.store(source + start + columns, gradient.to(logits.dtype.element_ty), mask=inside)
