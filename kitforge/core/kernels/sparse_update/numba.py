"""`sparse_update` in one pass: each row is updated in place by one thread."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled, parallel_for, prefetch_row
from kitforge.core.kernels.sparse_update.reference import (
    LAST_STEP,
    UPDATES,
    Powers,
    SparseUpdate,
    UpdateRule,
    integer_view,
)
from kitforge.foundation.errors import ModelError

# Elements per thread, at least.
GRAIN = 2**15
# Prefetch distance in rows: rows are scattered, so memory latency dominates.
AHEAD = 16
# Above this eps, an underflow of the mean square does not change the bound on the updates of a row without gradients.
SMALLEST_EPS = 1e-15

Floats = NDArray[Any]
Integers = NDArray[Any]
Indices = NDArray[np.int64]
# Slab, its memory as integers, slots and gradients.
Rows = tuple[Floats, Integers, Indices, Floats]


def update(slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    """See the reference."""
    loop = _LOOPS[rule.name]
    tables: tuple[Any, ...] = ()
    numbers = _numbers(slab, rate, rule.decay, rule.eps)
    if loop is _adam:
        tables = (rule.name == "lazy_adam", *(table.numpy() for table in rule.powers.tables(step, slab)))
    if loop in (_adam, _ftrl):
        numbers += _numbers(slab, *rule.constants(rate))
    rows = (slab.numpy(), integer_view(slab).numpy(), slots.numpy(), gradients.contiguous().numpy())
    beyond = parallel_for(
        lambda start, stop: loop(rows, step, numbers, *tables, start, stop),
        len(slots),
        GRAIN // max(gradients.shape[1], 1),
    )
    if loop is _adam and sum(beyond):
        raise ModelError("rows have more updates than there were steps", got=sum(beyond), expected="none")


def catch_up(slab: Tensor, slots: Tensor, dim: int, step: int, rates: Tensor, *, eps: float, powers: Powers) -> None:
    """See the reference. A row stops early once no later update can change a bit of it."""
    mean_beta, square_beta = powers.betas
    # Then the update of a row without gradients, up to rates and biases, never grows.
    is_bounded = mean_beta * mean_beta <= square_beta and eps >= SMALLEST_EPS
    tables = tuple(table.numpy() for table in powers.tables(step, slab))
    rows = (slab.numpy(), integer_view(slab).numpy(), slots.numpy())
    # Only the rates since the oldest row: those of all steps are far more than most rows need.
    first_step = rows[1][rows[2], LAST_STEP][rows[1][rows[2], UPDATES] > 0].min(initial=step - 1)
    used = rates[first_step:step].to(slab.dtype)
    numbers = (used.numpy(), int(first_step), *_numbers(slab, float(used.max()), eps))
    parallel_for(
        lambda start, stop: _catch_up(rows, dim, step, numbers, tables, is_bounded, start, stop),
        len(slots),
        GRAIN // max(dim, 1),
    )


def _numbers(slab: Tensor, *values: float) -> tuple[Any, ...]:
    """Numbers rounded to the slab's dtype, as torch rounds scalars in operations with a tensor."""
    return tuple(map(slab.numpy().dtype.type, values))


@compiled
def _prefetch_row(slab: Floats, slots: Indices, number: int, stop: int) -> None:
    if number < stop:
        prefetch_row(slab, slots[number], slab.shape[1])


@compiled
def _count(counters: Integers, slot: int, step: int) -> None:
    width = counters.shape[1]
    counters[slot, width + LAST_STEP] = step
    counters[slot, width + UPDATES] += 1


@compiled
def _sgd(rows: Rows, step: int, numbers: tuple[Any, ...], start: int, stop: int) -> None:
    slab, counters, slots, gradients = rows
    rate, decay, _ = numbers
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        row = slab[slots[number]]
        for column in range(gradients.shape[1]):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            row[column] -= gradient * rate
        _count(counters, slots[number], step)


@compiled
def _adagrad(rows: Rows, step: int, numbers: tuple[Any, ...], start: int, stop: int) -> None:
    slab, counters, slots, gradients = rows
    rate, decay, eps = numbers
    dim = gradients.shape[1]
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        row, total = slab[slots[number], :dim], slab[slots[number], dim : 2 * dim]
        for column in range(dim):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            total[column] += gradient * gradient
            row[column] -= gradient * rate / (np.sqrt(total[column]) + eps)
        _count(counters, slots[number], step)


@compiled
def _rowwise_adagrad(rows: Rows, step: int, numbers: tuple[Any, ...], start: int, stop: int) -> None:
    slab, counters, slots, gradients = rows
    rate, decay, eps = numbers
    dim, kind = gradients.shape[1], slab.dtype.type
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        row = slab[slots[number]]
        squares = kind(0)
        for column in range(dim):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            squares += gradient * gradient
        row[dim] += squares / kind(dim)
        pace = rate / (np.sqrt(row[dim]) + eps)
        for column in range(dim):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            row[column] -= gradient * pace
        _count(counters, slots[number], step)


@compiled
def _adam(
    rows: Rows,
    step: int,
    numbers: tuple[Any, ...],
    is_lazy: bool,
    powers: Floats,
    biases: Floats,
    start: int,
    stop: int,
) -> int:
    """The number of rows that claim more updates than there were steps; they stay as they are."""
    slab, counters, slots, gradients = rows
    rate, decay, eps, mean_beta, one_minus_mean_beta, square_beta, one_minus_square_beta = numbers
    dim, end, num_beyond = gradients.shape[1], powers.shape[1] - 1, 0
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        count, resting = counters[slot, counters.shape[1] + UPDATES] + 1, 0
        if is_lazy and (count < 1 or count > step):
            num_beyond += 1
            continue
        if not is_lazy:
            count, resting = step, min(step - 1 - counters[slot, 3 * dim], end)
            counters[slot, 3 * dim] = step
        # The power of no step of rest is 1, by which a product keeps its bits.
        mean_power, square_power = powers[0, resting], powers[1, resting]
        mean_bias, square_bias = biases[0, min(count, end)], biases[1, min(count, end)]
        row, mean, square = slab[slot, :dim], slab[slot, dim : 2 * dim], slab[slot, 2 * dim : 3 * dim]
        for column in range(dim):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            mean[column] = mean[column] * mean_power * mean_beta + gradient * one_minus_mean_beta
            square[column] = square[column] * square_power * square_beta + gradient * gradient * one_minus_square_beta
            row[column] -= mean[column] / mean_bias * rate / (np.sqrt(square[column] / square_bias) + eps)
        _count(counters, slot, step)
    return num_beyond


@compiled
def _ftrl(rows: Rows, step: int, numbers: tuple[Any, ...], start: int, stop: int) -> None:
    slab, counters, slots, gradients = rows
    rate, _, _, threshold, pull = numbers
    dim, zero = gradients.shape[1], slab.dtype.type(0)
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        row, total, linear = slab[slot, :dim], slab[slot, dim : 2 * dim], slab[slot, 2 * dim : 3 * dim]
        for column in range(dim):
            gradient = gradients[number, column]
            before = np.sqrt(total[column])
            total[column] += gradient * gradient
            after = np.sqrt(total[column])
            linear[column] += gradient * rate - (after - before) * row[column]
            edge = threshold if linear[column] > 0 else -threshold
            moved = (edge - linear[column]) / (after + pull)
            # A comparison with NaN is False, so NaN does not become zero.
            row[column] = zero if abs(linear[column]) <= threshold else moved
        _count(counters, slot, step)


@compiled
def _catch_up(
    rows: tuple[Floats, Integers, Indices],
    dim: int,
    step: int,
    numbers: tuple[Any, ...],
    tables: tuple[Floats, ...],
    is_bounded: bool,
    start: int,
    stop: int,
) -> None:
    slab, counters, slots = rows
    powers, biases = tables
    rates, first, largest_rate, eps = numbers
    width, end = counters.shape[1], powers.shape[1] - 1
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        last, since = counters[slot, width + LAST_STEP], counters[slot, 3 * dim]
        counters[slot, width + LAST_STEP] = max(last, step)
        # A row without any gradient so far has zero moments and does not rule.
        if counters[slot, width + UPDATES] == 0:
            continue
        for now in range(last + 1, step + 1):
            record, resting, index = slab[slot], min(now - since, end), min(now, end)
            decayed, biases_now = (powers[0, resting], powers[1, resting]), (biases[0, index], biases[1, index])
            is_checked = is_bounded and (now - last) % 8 == 1
            if is_checked and _is_stationary(record, dim, decayed, biases_now[0], largest_rate, eps):
                break
            _step_without_gradient(record, dim, decayed, biases_now, rates[now - 1 - first], eps)


@compiled
def _step_without_gradient(
    record: Floats, dim: int, powers: tuple[Any, ...], biases: tuple[Any, ...], rate: Any, eps: Any
) -> None:
    """One Adam step without a gradient; `powers` and `biases` are those of both moments."""
    row, mean, square = record[:dim], record[dim : 2 * dim], record[2 * dim : 3 * dim]
    for column in range(dim):
        root = np.sqrt(square[column] * powers[1] / biases[1]) + eps
        row[column] -= mean[column] * powers[0] / biases[0] * rate / root


@compiled
def _is_stationary(record: Floats, dim: int, powers: tuple[Any, ...], bias: Any, largest_rate: Any, eps: Any) -> bool:
    """Whether twice the largest update of an element, now or later, is rounded away."""
    for column in range(dim):
        root = np.sqrt(record[2 * dim + column] * powers[1]) + eps
        most = abs(record[dim + column] * powers[0]) / bias * largest_rate / root
        most += most
        if record[column] + most != record[column] or record[column] - most != record[column]:
            return False
    return True


_LOOPS: dict[str, Any] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "lazy_adam": _adam,
    "ftrl": _ftrl,
}
SPARSE_UPDATE = SparseUpdate(update=update, catch_up=catch_up)
