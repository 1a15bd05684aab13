"""`random_sample` in Triton: a program reads a row twice, and the block that holds the drawn index once more. A row has
the same bits whatever rows are beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.runtime import launch_grid, logits_tiles, quotient_up, row_block

# The largest fraction below one: that of the last number that is smaller than a total.
_BELOW_ONE = tl.constexpr(1 - 2.0**-52)


def random_sample(logits: Tensor, points: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """See `RandomSampleKernel`; for fp32, without gradients."""
    logits, points = logits.contiguous(), points.contiguous()
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    if len(logits):
        rows, block = logits_tiles(logits)
        scale = 1 / max(temperature, torch.finfo(logits.dtype).tiny)
        arguments = logits, points, chosen, logprobs, *logits.shape, scale
        count = row_block(quotient_up(logits.shape[1], block))
        launch_grid(_draw_kernel, rows, block, *arguments, is_queued=True, COUNT=count)
    return chosen, logprobs


@triton.jit
def _draw_kernel(
    logits,
    points,
    chosen,
    logprobs,
    num_rows,
    width,
    scale,
    steps,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
):
    columns, blocks = tl.arange(0, BLOCK), tl.arange(0, COUNT)
    for step in range(steps):
        row = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64)
        if row < num_rows:
            own = logits + row * width
            largest = tl.full([BLOCK], float("-inf"), EXACT)
            for start in range(0, width, BLOCK):
                values = tl.load(own + start + columns, mask=start + columns < width, other=float("-inf"))
                largest = tl.where(values > largest, values, largest)
            top = tl.max(largest, 0)
            totals = tl.zeros([COUNT], tl.float64)
            for start in range(0, width, BLOCK):
                values = tl.load(own + start + columns, mask=start + columns < width, other=float("-inf"))
                total = tl.sum(tl.exp((values - top) * scale), 0)
                totals = tl.where(blocks == start // BLOCK, total.to(tl.float64), totals)
            ends = tl.cumsum(totals, 0)
            goal = tl.minimum(tl.load(points + row), _BELOW_ONE) * tl.max(ends, 0)
            block = tl.minimum(tl.sum((ends <= goal).to(tl.int32), 0), (width - 1) // BLOCK)
            before = tl.sum(tl.where(blocks < block, totals, 0.0), 0)
            fraction = (goal - before) / tl.sum(tl.where(blocks == block, totals, 0.0), 0)
            inside = block * BLOCK + columns
            values = tl.load(own + inside, mask=inside < width, other=float("-inf"))
            inner = tl.cumsum(tl.exp((values - top) * scale).to(tl.float64), 0)
            # The total of the block was rounded otherwise, which the last token would pay for.
            goal = tl.minimum(fraction, _BELOW_ONE) * tl.max(inner, 0)
            token = tl.minimum(block * BLOCK + tl.sum((inner <= goal).to(tl.int32), 0), width - 1)
            tl.store(chosen + row, token.to(tl.int64))
            # The sum of a row with NaN is NaN, which its largest end need not be.
            score = (tl.load(own + token) - top) * scale - tl.log(tl.sum(totals, 0))
            tl.store(logprobs + row, score.to(EXACT))
