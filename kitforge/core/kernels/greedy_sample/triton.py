"""`greedy_sample` in Triton: a program reads a row twice and writes no probabilities. A row has the same bits whatever
rows are beside it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton.runtime import launch_grid, logits_tiles


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `GreedySampleKernel`; for fp32, without gradients."""
    logits = logits.contiguous()
    chosen = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    logprobs = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    if len(logits):
        sizes = logits.shape
        launch_grid(_choose_kernel, *logits_tiles(logits), logits, chosen, logprobs, *sizes, is_queued=True)
    return chosen, logprobs


@triton.jit
def _choose_kernel(logits, chosen, logprobs, num_rows, width, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for step in range(steps):
        row = (tl.program_id(0) + step * tl.num_programs(0)).to(tl.int64)
        if row < num_rows:
            own = logits + row * width
            largest = tl.full([BLOCK], float("-inf"), EXACT)
            first = tl.zeros([BLOCK], tl.int32)
            for start in range(0, width, BLOCK):
                values = tl.load(own + start + columns, mask=start + columns < width, other=float("-inf"))
                # NaN is never larger; the sum below shows it.
                is_larger = values > largest
                largest = tl.where(is_larger, values, largest)
                first = tl.where(is_larger, start + columns, first)
            top = tl.max(largest, 0)
            tl.store(chosen + row, tl.min(tl.where(largest == top, first, width - 1), 0).to(tl.int64))
            total = tl.zeros([BLOCK], EXACT)
            for start in range(0, width, BLOCK):
                values = tl.load(own + start + columns, mask=start + columns < width, other=float("-inf"))
                total += tl.exp(values - top)
            tl.store(logprobs + row, -tl.log(tl.sum(total, 0)))
