"""`sparse_update` in Triton: a row with its states is read once and written once, in one kernel for every rule.

Products and sums are rounded one by one, as in the reference; only the squares of row-wise Adagrad are summed in
another order. `slots` are distinct; one out of range is left out, as naming it would need a synchronization. Rates and
other constants are fp32, so a float64 slab is as exact as they are.
"""

import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.sparse_update.reference import Powers, SparseUpdate, UpdateRule, integer_view
from kitforge.core.kernels.triton.math import divide, root
from kitforge.core.kernels.triton.rows import launch_rows, tile_of_rows


def update(slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    """See the reference."""
    dim = gradients.shape[1]
    if not gradients.numel():
        return
    # Tables that no rule but Adam reads.
    kept = biases = slab
    if rule.name in ("adam", "lazy_adam"):
        kept, biases = rule.powers.tables(step, slab)
    features, rows, tiles = tile_of_rows(slab.device, len(slots), dim)
    launch_rows(
        *(_update_kernel, tiles, rows),
        *(slab, integer_view(slab), slots, gradients, kept, biases, len(slots), len(slab), dim),
        *(slab.shape[1], kept.shape[1], slab.stride(0), *gradients.stride()),
        *(rate, step, rule.decay, rule.eps, *(*rule.constants(rate), 0.0, 0.0)[:4]),
        enable_fp_fusion=False,
        FEATURES=features,
        RULE=rule.name,
        DECAYS=bool(rule.decay),
    )


def catch_up(slab: Tensor, slots: Tensor, dim: int, step: int, rates: Tensor, *, eps: float, powers: Powers) -> None:
    """See the reference."""
    if not slots.numel() * dim:
        return
    kept, biases = powers.tables(step, slab)
    features, rows, tiles = tile_of_rows(slab.device, len(slots), dim)
    launch_rows(
        *(_catch_up_kernel, tiles, rows),
        *(slab, integer_view(slab), slots, rates.to(slab.device, slab.dtype), kept, biases, len(slots), len(slab), dim),
        *(slab.shape[1], kept.shape[1], slab.stride(0), step, eps),
        enable_fp_fusion=False,
        FEATURES=features,
    )


@triton.jit
def _adam_move(mean, square, rate, eps, mean_bias, square_bias, EXACT: tl.constexpr):
    move = divide(mean, mean_bias[:, None], EXACT) * rate
    return divide(move, root(divide(square, square_bias[:, None], EXACT), EXACT) + eps, EXACT)


@triton.jit
def _ftrl(x, linear, before, gradient, total, rate, threshold, shrink, EXACT: tl.constexpr):
    after = root(total, EXACT)
    linear += gradient * rate - (after - root(before, EXACT)) * x
    sign = tl.where(linear > 0, 1.0, tl.where(linear < 0, -1.0, 0.0)).to(EXACT)
    moved = divide(sign * threshold - linear, after + shrink, EXACT)
    # A comparison with NaN is false, so NaN does not become zero.
    return tl.where(tl.abs(linear) <= threshold, 0.0, moved).to(EXACT), linear


@triton.jit
def _update_kernel(
    slab,
    integers,
    slots,
    gradients,
    kept,
    biases,
    num_rows,
    slab_rows,
    dim,
    width,
    num_powers,
    stride,
    gradient_row,
    gradient_column,
    rate,
    step_number,
    decay,
    eps,
    one,
    two,
    three,
    four,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
    RULE: tl.constexpr,
    DECAYS: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
        is_row = (slot >= 0) & (slot < slab_rows)
        inside = is_row[:, None] & (columns < dim)[None, :]
        start = slot * stride
        offset = start[:, None] + columns[None, :]
        x = tl.load(slab + offset, mask=inside, other=0)
        gradient_offset = rows[:, None] * gradient_row + columns[None, :] * gradient_column
        gradient = tl.load(gradients + gradient_offset, mask=inside, other=0).to(EXACT)
        updates = tl.load(integers + start + width - 2, mask=is_row, other=0) + 1
        if DECAYS:
            gradient += x * decay
        if RULE == "sgd":
            x -= gradient * rate
        elif RULE == "rowwise_adagrad":
            # A state of one column: the mean of the squares of all.
            squares = tl.sum(tl.where(inside, gradient * gradient, 0.0), 1)
            total = tl.load(slab + start + dim, mask=is_row, other=0) + divide(
                squares, tl.zeros_like(squares) + dim, EXACT
            )
            tl.store(slab + start + dim, total, mask=is_row)
            x -= gradient * divide(rate + tl.zeros_like(total), root(total, EXACT) + eps, EXACT)[:, None]
        elif RULE == "adagrad":
            total = tl.load(slab + offset + dim, mask=inside, other=0) + gradient * gradient
            tl.store(slab + offset + dim, total, mask=inside)
            x -= divide(gradient * rate, root(total, EXACT) + eps, EXACT)
        elif RULE == "ftrl":
            before = tl.load(slab + offset + dim, mask=inside, other=0)
            linear = tl.load(slab + offset + 2 * dim, mask=inside, other=0)
            total = before + gradient * gradient
            x, linear = _ftrl(x, linear, before, gradient, total, rate, one, two, EXACT)
            tl.store(slab + offset + dim, total, mask=inside)
            tl.store(slab + offset + 2 * dim, linear, mask=inside)
        else:
            mean = tl.load(slab + offset + dim, mask=inside, other=0)
            square = tl.load(slab + offset + 2 * dim, mask=inside, other=0)
            count = updates
            if RULE == "adam":
                # Between two gradients both moments only decay.
                since = tl.load(integers + start + 3 * dim, mask=is_row, other=0)
                resting = tl.minimum(step_number - 1 - since, num_powers - 1)
                mean *= tl.load(kept + resting, mask=is_row, other=1)[:, None]
                square *= tl.load(kept + num_powers + resting, mask=is_row, other=1)[:, None]
                count = tl.zeros_like(updates) + step_number
                tl.store(integers + start + 3 * dim, count, mask=is_row)
            mean = mean * one + gradient * two
            square = square * three + gradient * gradient * four
            count = tl.minimum(count, num_powers - 1)
            mean_bias = tl.load(biases + count, mask=is_row, other=1)
            square_bias = tl.load(biases + num_powers + count, mask=is_row, other=1)
            x -= _adam_move(mean, square, rate, eps, mean_bias, square_bias, EXACT)
            tl.store(slab + offset + dim, mean, mask=inside)
            tl.store(slab + offset + 2 * dim, square, mask=inside)
        tl.store(slab + offset, x, mask=inside)
        tl.store(integers + start + width - 3, tl.zeros_like(updates) + step_number, mask=is_row)
        tl.store(integers + start + width - 2, updates, mask=is_row)


@triton.jit
def _catch_up_kernel(
    slab,
    integers,
    slots,
    rates,
    kept,
    biases,
    num_rows,
    slab_rows,
    dim,
    width,
    num_powers,
    stride,
    last_step,
    eps,
    steps,
    BLOCK: tl.constexpr,
    EXACT: tl.constexpr,
    FEATURES: tl.constexpr,
):
    columns = tl.arange(0, FEATURES)
    for step in range(steps):
        rows = (tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)) * BLOCK + tl.arange(0, BLOCK)
        slot = tl.load(slots + rows, mask=rows < num_rows, other=-1)
        is_row = (slot >= 0) & (slot < slab_rows)
        inside = is_row[:, None] & (columns < dim)[None, :]
        start = slot * stride
        offset = start[:, None] + columns[None, :]
        x = tl.load(slab + offset, mask=inside, other=0)
        mean = tl.load(slab + offset + dim, mask=inside, other=0)
        square = tl.load(slab + offset + 2 * dim, mask=inside, other=0)
        reached = tl.load(integers + start + width - 3, mask=is_row, other=0)
        since = tl.load(integers + start + 3 * dim, mask=is_row, other=0)
        # A row without any gradient so far has zero moments and does not rule.
        has_moments = tl.load(integers + start + width - 2, mask=is_row, other=0) > 0
        idle = tl.zeros_like(reached) + last_step
        for now in range(tl.min(tl.where(has_moments, reached, idle), 0) + 1, last_step + 1):
            is_moving = has_moments & (reached < now)
            resting = tl.minimum(now - since, num_powers - 1)
            decayed = mean * tl.load(kept + resting, mask=is_moving, other=0)[:, None]
            decayed_square = square * tl.load(kept + num_powers + resting, mask=is_moving, other=0)[:, None]
            count = tl.zeros_like(since) + tl.minimum(now, num_powers - 1)
            mean_bias = tl.load(biases + count, mask=is_moving, other=1)
            square_bias = tl.load(biases + num_powers + count, mask=is_moving, other=1)
            move = _adam_move(decayed, decayed_square, tl.load(rates + now - 1), eps, mean_bias, square_bias, EXACT)
            x -= tl.where(is_moving[:, None], move, 0.0)
        tl.store(slab + offset, x, mask=inside)
        tl.store(integers + start + width - 3, tl.maximum(reached, last_step), mask=is_row)


SPARSE_UPDATE = SparseUpdate(update=update, catch_up=catch_up)
