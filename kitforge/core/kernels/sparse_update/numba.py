"""`sparse_update` in one pass: each row is updated in place by one thread."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.numba_runtime import compiled, parallel_for, prefetch_row
from kitforge.core.kernels.sparse_update.reference import LAST_STEP, UPDATES, Powers, SparseUpdate, integer_view
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


def sgd(slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float) -> None:
    """See the reference."""
    _over_rows(_sgd, slab, slots, gradients, step, _numbers(slab, rate, decay))


def adagrad(
    slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float, eps: float
) -> None:
    """See the reference."""
    _over_rows(_adagrad, slab, slots, gradients, step, _numbers(slab, rate, decay, eps))


def rowwise_adagrad(
    slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float, eps: float
) -> None:
    """See the reference."""
    _over_rows(_rowwise_adagrad, slab, slots, gradients, step, _numbers(slab, rate, decay, eps))


def lazy_adam(
    slab: Tensor,
    slots: Tensor,
    gradients: Tensor,
    rate: float,
    step: int,
    *,
    decay: float,
    eps: float,
    powers: Powers,
) -> None:
    """See the reference."""
    biases = powers.tables(step, slab)[1].numpy()
    numbers = _numbers(slab, rate, decay, eps, *powers.betas_and_complements)
    beyond = _over_rows(_lazy_adam, slab, slots, gradients, step, numbers, biases)
    if sum(beyond):
        raise ModelError("rows have more updates than there were steps", got=sum(beyond), expected="none")


def ftrl(
    slab: Tensor,
    slots: Tensor,
    gradients: Tensor,
    rate: float,
    step: int,
    *,
    l1: float,
    l2: float,
    beta: float,
) -> None:
    """See the reference."""
    _over_rows(_ftrl, slab, slots, gradients, step, _numbers(slab, rate, rate * l1, beta + 2.0 * rate * l2))


def adam(
    slab: Tensor,
    slots: Tensor,
    gradients: Tensor,
    rate: float,
    step: int,
    *,
    eps: float,
    powers: Powers,
) -> None:
    """See the reference."""
    kept, biases = (table.numpy() for table in powers.tables(step, slab))
    numbers = (*_numbers(slab, rate, eps, *powers.betas_and_complements), *biases[:, min(step, biases.shape[1] - 1)])
    _over_rows(_adam, slab, slots, gradients, step, numbers, kept)


def catch_up(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    step: int,
    rates: Tensor,
    *,
    eps: float,
    powers: Powers,
) -> None:
    """See the reference. A row stops early once no later update can change a bit of it."""
    mean_beta, square_beta = powers.betas
    # Then the update of a row without gradients, up to rates and biases, never grows.
    is_bounded = mean_beta * mean_beta <= square_beta and eps >= SMALLEST_EPS
    kept, biases = (table.numpy() for table in powers.tables(step, slab))
    rows = (slab.numpy(), integer_view(slab).numpy(), slots.numpy())
    # Only the rates since the oldest row: those of all steps are far more than most rows need.
    first_step = rows[1][rows[2], LAST_STEP][rows[1][rows[2], UPDATES] > 0].min(initial=step - 1)
    used = rates[first_step:step].to(slab.dtype)
    numbers = (used.numpy(), int(first_step), *_numbers(slab, float(used.max()), eps))
    parallel_for(
        lambda start, stop: _catch_up(*rows, dim, step, numbers, kept, biases, is_bounded, start, stop),
        len(slots),
        GRAIN // max(dim, 1),
    )


SPARSE_UPDATE = SparseUpdate(
    sgd=sgd,
    adagrad=adagrad,
    rowwise_adagrad=rowwise_adagrad,
    adam=adam,
    lazy_adam=lazy_adam,
    ftrl=ftrl,
    catch_up=catch_up,
)


def _over_rows(
    update: Any, slab: Tensor, slots: Tensor, gradients: Tensor, step: int, numbers: tuple[Any, ...], *tables: Floats
) -> list[Any]:
    """Run a loop over rows on several threads."""
    rows = (slab.numpy(), integer_view(slab).numpy(), slots.numpy(), gradients.contiguous().numpy())
    grain = GRAIN // max(gradients.shape[1], 1)
    return parallel_for(lambda start, stop: update(*rows, step, numbers, *tables, start, stop), len(slots), grain)


def _numbers(slab: Tensor, *values: float) -> tuple[Any, ...]:
    """Numbers rounded to the slab's dtype, as torch rounds scalars in operations with a tensor."""
    return tuple(slab.numpy().dtype.type(value) for value in values)


@compiled
def _prefetch_row(slab: Floats, slots: Indices, number: int, stop: int) -> None:
    """Prefetch a later row."""
    if number < stop:
        prefetch_row(slab, slots[number], slab.shape[1])


@compiled
def _count(counters: Integers, slot: int, step: int) -> None:
    width = counters.shape[1]
    counters[slot, width + LAST_STEP] = step
    counters[slot, width + UPDATES] += 1


@compiled
def _sgd(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    start: int,
    stop: int,
) -> None:
    rate, decay = numbers
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        if decay == 0:
            for column in range(gradients.shape[1]):
                slab[slot, column] -= gradients[number, column] * rate
        else:
            for column in range(gradients.shape[1]):
                slab[slot, column] -= (gradients[number, column] + slab[slot, column] * decay) * rate
        _count(counters, slot, step)


@compiled
def _adagrad(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    start: int,
    stop: int,
) -> None:
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
def _rowwise_adagrad(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    start: int,
    stop: int,
) -> None:
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
def _lazy_adam(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    biases: Floats,
    start: int,
    stop: int,
) -> int:
    rate, decay, eps, mean_beta, one_minus_mean_beta, square_beta, one_minus_square_beta = numbers
    dim, num_beyond = gradients.shape[1], 0
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        count = counters[slot, counters.shape[1] + UPDATES] + 1
        if count < 1 or count > step:
            num_beyond += 1
            continue
        row, mean, square = slab[slot, :dim], slab[slot, dim : 2 * dim], slab[slot, 2 * dim : 3 * dim]
        index = min(count, biases.shape[1] - 1)
        mean_bias, square_bias = biases[0, index], biases[1, index]
        for column in range(dim):
            gradient = gradients[number, column]
            if decay != 0:
                gradient += row[column] * decay
            mean[column] = mean[column] * mean_beta + gradient * one_minus_mean_beta
            square[column] = square[column] * square_beta + gradient * gradient * one_minus_square_beta
            row[column] -= mean[column] / mean_bias * rate / (np.sqrt(square[column] / square_bias) + eps)
        _count(counters, slot, step)
    return num_beyond


@compiled
def _ftrl(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    start: int,
    stop: int,
) -> None:
    rate, threshold, pull = numbers
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
def _adam(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    gradients: Floats,
    step: int,
    numbers: tuple[Any, ...],
    powers: Floats,
    start: int,
    stop: int,
) -> None:
    rate, eps, mean_beta, one_minus_mean_beta, square_beta, one_minus_square_beta, mean_bias, square_bias = numbers
    dim = gradients.shape[1]
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        resting = min(step - 1 - counters[slot, 3 * dim], powers.shape[1] - 1)
        mean_power, square_power = powers[0, resting], powers[1, resting]
        row, mean, square = slab[slot, :dim], slab[slot, dim : 2 * dim], slab[slot, 2 * dim : 3 * dim]
        for column in range(dim):
            gradient = gradients[number, column]
            mean[column] = mean[column] * mean_power * mean_beta + gradient * one_minus_mean_beta
            square[column] = square[column] * square_power * square_beta + gradient * gradient * one_minus_square_beta
            row[column] -= mean[column] / mean_bias * rate / (np.sqrt(square[column] / square_bias) + eps)
        counters[slot, 3 * dim] = step
        _count(counters, slot, step)


@compiled
def _catch_up(
    slab: Floats,
    counters: Integers,
    slots: Indices,
    dim: int,
    step: int,
    numbers: tuple[Any, ...],
    powers: Floats,
    biases: Floats,
    is_bounded: bool,
    start: int,
    stop: int,
) -> None:
    rates, first, largest_rate, eps = numbers
    width, end = counters.shape[1], powers.shape[1] - 1
    for number in range(start, stop):
        _prefetch_row(slab, slots, number + AHEAD, stop)
        slot = slots[number]
        last, since = counters[slot, width + LAST_STEP], counters[slot, 3 * dim]
        counters[slot, width + LAST_STEP] = max(last, step)
        # A row without any gradient so far has zero moments and does not move.
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
