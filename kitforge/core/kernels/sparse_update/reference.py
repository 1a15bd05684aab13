"""The definition of `sparse_update`: optimizer steps on rows of a slab, in plain torch.

A row of `slab` [rows, width] is `[embedding (dim) | states | last_step | updates | visits]`; the last three are
integers in the bits of floats, without float arithmetic. `slots` [u] are distinct rows, checked by the caller;
`gradients` [u, dim]. Each operation is rounded by itself, in the slab's dtype, so that every
implementation can have the same bits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Columns of a row's integers, from its end.
LAST_STEP, UPDATES, VISITS = -3, -2, -1
NUM_COUNTERS = 3
# Entries of a table at first; it doubles when they run out.
FIRST_ENTRIES = 1024
# Every rule begins with slab, slots, gradients, rate, step.
UpdateRule = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseUpdate:
    """Optimizer steps on rows of a slab, in place, defined by the functions of the same names below."""

    sgd: UpdateRule
    adagrad: UpdateRule
    rowwise_adagrad: UpdateRule
    adam: UpdateRule
    lazy_adam: UpdateRule
    ftrl: UpdateRule
    catch_up: Callable[..., None]


class Powers:
    """Tables of beta^t and 1 - beta^t for both betas of Adam, rounded to the dtype of a slab.

    From some t on a power is zero in that dtype and 1 - beta^t is one, so the tables end there: 104,000 entries for a
    beta of 0.999 in fp32.
    """

    def __init__(self, betas: tuple[float, ...]) -> None:
        self.betas = betas
        self.betas_and_complements = tuple(each for beta in betas for each in (beta, 1.0 - beta))
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, last: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """beta^t and 1 - beta^t [2, n], in the dtype and on the device of `like`; t up to `last` is at index
        min(t, n - 1)."""
        key = (like.dtype, like.device)
        known = self._tables.get(key)
        if known is not None and known[0].shape[1] > min(last, self._end(like.dtype)):
            return known
        num = min(max(2 * last, FIRST_ENTRIES), self._end(like.dtype)) + 1
        # Python's power: torch's depends on the position within a vector register.
        exact = torch.tensor([[beta**power for power in range(num)] for beta in self.betas], dtype=torch.float64)
        self._tables[key] = (exact.to(like.device, like.dtype), (1.0 - exact).to(like.device, like.dtype))
        return self._tables[key]

    def _end(self, dtype: torch.dtype) -> int:
        """The first t whose powers are all below half of the smallest number of the dtype."""
        info = torch.finfo(dtype)
        smallest = math.log(info.smallest_normal) + math.log(info.eps) - math.log(2)
        return max(1 if beta == 0 else math.ceil(smallest / math.log(beta)) + 1 for beta in self.betas)


def integer_view(slab: Tensor) -> Tensor:
    """The same memory [rows, width] as integers of the same size."""
    return slab.view(torch.int64 if slab.dtype == torch.float64 else torch.int32)


def sgd(slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float) -> None:
    """row = row - rate * gradient."""
    rows = slab[slots]
    row = rows[:, : gradients.shape[1]]
    row.sub_(_decayed(gradients, row, decay) * rate)
    _put(slab, slots, rows, step)


def adagrad(
    slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float, eps: float
) -> None:
    """sum = sum + gradient^2; row = row - rate * gradient / (sqrt(sum) + eps). States: sum (dim)."""
    rows, dim = slab[slots], gradients.shape[1]
    row, total = rows[:, :dim], rows[:, dim : 2 * dim]
    gradients = _decayed(gradients, row, decay)
    total.add_(gradients * gradients)
    row.sub_((gradients * rate).div_(_root(total).add_(eps)))
    _put(slab, slots, rows, step)


def rowwise_adagrad(
    slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, *, decay: float, eps: float
) -> None:
    """sum = sum + mean(gradient^2); row = row - rate / (sqrt(sum) + eps) * gradient. States: sum (1).

    The squares of a row are summed in order.
    """
    rows, dim = slab[slots], gradients.shape[1]
    row, total = rows[:, :dim], rows[:, dim : dim + 1]
    gradients = _decayed(gradients, row, decay)
    squares = gradients.new_zeros(len(gradients), 1)
    for column in range(dim):
        one = gradients[:, column : column + 1]
        squares += one * one
    total.add_(squares / dim)
    row.sub_(gradients * torch.full_like(total, rate).div_(_root(total).add_(eps)))
    _put(slab, slots, rows, step)


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
    """LazyAdam: t counts the gradients of the row. States: mean (dim), square (dim).

    `powers` are those of both betas.
    """
    rows, dim = slab[slots], gradients.shape[1]
    row, mean, square = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    counts = integer_view(slab)[slots, UPDATES].long() + 1
    gradients = _decayed(gradients, row, decay)
    _add_to_moments(mean, square, gradients, powers)
    row.sub_(_adam_move(mean, square, rate, eps, _at(powers.tables(step, slab)[1], counts)))
    _put(slab, slots, rows, step)


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
    """FTRL-Proximal (McMahan et al., 2013) with the doubled l2 of TensorFlow's Ftrl. States: sum (dim), linear (dim).

    new = sum + gradient^2; linear = linear + rate gradient - (sqrt(new) - sqrt(sum)) row; row = 0 where
    |linear| <= rate l1, else (sign(linear) rate l1 - linear) / (sqrt(new) + beta + 2 rate l2).

    The linear state is the paper's times the rate. With a constant rate that changes nothing; the paper's would rescale
    the whole row with the rate of each step, and so with every schedule. Without l1, l2 and beta this is Adagrad at any
    rates.
    """
    rows, dim = slab[slots], gradients.shape[1]
    row, total, linear = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    before = _root(total)
    total.add_(gradients * gradients)
    after = _root(total)
    linear.add_(gradients * rate - (after - before) * row)
    moved = (torch.sign(linear) * (rate * l1) - linear) / (after + (beta + 2.0 * rate * l2))
    # A comparison with NaN is False, so NaN does not become zero.
    row.copy_(torch.where(linear.abs() <= rate * l1, torch.zeros_like(moved), moved))
    _put(slab, slots, rows, step)


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
    """Step `step` of dense Adam for rows that have been caught up to the step before.

    States: mean (dim), square (dim), and as an integer the step of both moments (1).
    """
    rows, dim = slab[slots], gradients.shape[1]
    row, mean, square = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    resting = step - 1 - integer_view(rows)[:, 3 * dim].long()
    kept, biases = powers.tables(step, slab)
    mean_power, square_power = _at(kept, resting)
    mean.mul_(mean_power)
    square.mul_(square_power)
    _add_to_moments(mean, square, gradients, powers)
    row.sub_(_adam_move(mean, square, rate, eps, _at(biases, torch.full_like(slots, step))))
    integer_view(rows)[:, 3 * dim] = step
    _put(slab, slots, rows, step)


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
    """Apply dense Adam's updates of rows without a gradient, up to step `step`.

    `rates` [at least step] float64 are the learning rates of all steps. The moments stay those of the last gradient;
    only the row moves, step by step, so the number of calls changes no bit.
    """
    rows = slab[slots]
    row, mean, square = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    last, since = integer_view(rows)[:, LAST_STEP].long(), integer_view(rows)[:, 3 * dim].long()
    # A row without any gradient so far has zero moments and does not move.
    has_moments = integer_view(rows)[:, UPDATES] > 0
    first = int(last[has_moments].min()) + 1 if bool(has_moments.any()) else step + 1
    powers_of, biases_of = powers.tables(step, slab)
    for now in range(first, step + 1):
        moving = ((last < now) & has_moments).nonzero().squeeze(1)
        resting = now - since[moving]
        mean_power, square_power = _at(powers_of, resting)
        decayed = (mean[moving] * mean_power, square[moving] * square_power)
        biases = _at(biases_of, torch.full_like(moving, now))
        row[moving] -= _adam_move(*decayed, float(rates[now - 1]), eps, biases)
    integer_view(rows)[:, LAST_STEP] = last.clamp(min=step).to(integer_view(rows).dtype)
    slab[slots] = rows


def _decayed(gradients: Tensor, row: Tensor, decay: float) -> Tensor:
    return gradients + row * decay if decay else gradients


def _add_to_moments(mean: Tensor, square: Tensor, gradients: Tensor, powers: Powers) -> None:
    mean_beta, square_beta = powers.betas
    mean.mul_(mean_beta).add_(gradients * (1.0 - mean_beta))
    square.mul_(square_beta).add_((gradients * gradients).mul_(1.0 - square_beta))


def _adam_move(mean: Tensor, square: Tensor, rate: float, eps: float, biases: tuple[Tensor, Tensor]) -> Tensor:
    return (mean / biases[0]).mul_(rate).div_(_root(square / biases[1]).add_(eps))


def _root(squares: Tensor) -> Tensor:
    """The square root, correctly rounded (IEEE 754); torch's own on CPU is sometimes off by one ulp."""
    if squares.device.type != "cpu":
        return squares.sqrt()
    return torch.from_numpy(np.sqrt(squares.numpy()))


def _at(table: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The values [u, 1] of both betas at indices [u] of a table [2, n]; indices beyond it read its last entry."""
    values = table[:, indices.clamp(max=table.shape[1] - 1)].unsqueeze(2)
    return values[0], values[1]


def _put(slab: Tensor, slots: Tensor, rows: Tensor, step: int) -> None:
    """Write updated rows back and count the update."""
    integer_view(rows)[:, LAST_STEP] = step
    integer_view(rows)[:, UPDATES] += 1
    slab[slots] = rows


SPARSE_UPDATE = SparseUpdate(
    sgd=sgd,
    adagrad=adagrad,
    rowwise_adagrad=rowwise_adagrad,
    adam=adam,
    lazy_adam=lazy_adam,
    ftrl=ftrl,
    catch_up=catch_up,
)
