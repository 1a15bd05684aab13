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


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRule:
    """A rule with its constants. The states of a row and its step t at a rate, by the name of the rule:

    - sgd: row = row - rate * gradient.
    - adagrad: sum (dim) = sum + gradient^2; row = row - rate * gradient / (sqrt(sum) + eps).
    - rowwise_adagrad: sum (1) = sum + mean(gradient^2); row = row - rate / (sqrt(sum) + eps) * gradient. The squares of
      a row are summed in order.
    - lazy_adam: Adam whose t counts the gradients of the row. States: mean (dim), square (dim).
    - adam: step t of dense Adam, for rows that have been caught up to the step before. States: mean (dim), square
      (dim), and as an integer the step of both moments (1).
    - ftrl: FTRL-Proximal (McMahan et al., 2013) with the doubled l2 of TensorFlow's Ftrl. States: sum (dim), linear
      (dim). new = sum + gradient^2; linear = linear + rate gradient - (sqrt(new) - sqrt(sum)) row; row = 0 where
      |linear| <= rate l1, else (sign(linear) rate l1 - linear) / (sqrt(new) + beta + 2 rate l2).

    The linear state of ftrl is the paper's times the rate. With a constant rate that changes nothing; the paper's would
    rescale the whole row with the rate of each step, and so with every schedule. Without l1, l2 and beta this is
    Adagrad at any rates.
    """

    name: str
    powers: Powers  # of both betas
    decay: float = 0.0  # times the row is added to the gradient
    eps: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    beta: float = 0.0

    def constants(self, rate: float) -> tuple[float, ...]:
        """What the rule multiplies and adds beside rate, decay and eps: ftrl's threshold and the sum with its root, or
        both betas of Adam with their complements."""
        if self.name == "ftrl":
            return rate * self.l1, self.beta + 2.0 * rate * self.l2
        return self.powers.betas_and_complements


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseUpdate:
    """Optimizer steps on rows of a slab, in place, defined by the functions of the same names below."""

    update: Callable[[Tensor, Tensor, Tensor, float, int, UpdateRule], None]
    catch_up: Callable[..., None]


def update(slab: Tensor, slots: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    """Step `step`, counted from 1, of the rows at `slots`."""
    rows, dim = slab[slots], gradients.shape[1]
    if rule.decay:
        gradients = gradients + rows[:, :dim] * rule.decay
    _RULES[rule.name](rows, gradients, rate, step, rule)
    integer_view(rows)[:, LAST_STEP] = step
    integer_view(rows)[:, UPDATES] += 1
    slab[slots] = rows


def _sgd(rows: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    rows[:, : gradients.shape[1]].sub_(gradients * rate)


def _adagrad(rows: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    row, total = rows[:, : 2 * gradients.shape[1]].chunk(2, 1)
    total.add_(gradients * gradients)
    row.sub_((gradients * rate).div_(_root(total).add_(rule.eps)))


def _rowwise_adagrad(rows: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    dim = gradients.shape[1]
    row, total = rows[:, :dim], rows[:, dim : dim + 1]
    squares = gradients.new_zeros(len(gradients), 1)
    for one in torch.split(gradients, 1, 1):
        squares += one * one
    total.add_(squares / dim)
    row.sub_(gradients * torch.full_like(total, rate).div_(_root(total).add_(rule.eps)))


def _ftrl(rows: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    row, total, linear = rows[:, : 3 * gradients.shape[1]].chunk(3, 1)
    threshold, pull = rule.constants(rate)
    before = _root(total)
    total.add_(gradients * gradients)
    after = _root(total)
    linear.add_(gradients * rate - (after - before) * row)
    moved = (torch.sign(linear) * threshold - linear) / (after + pull)
    # A comparison with NaN is False, so NaN does not become zero.
    row.copy_(torch.where(linear.abs() <= threshold, torch.zeros_like(moved), moved))


def _adam(rows: Tensor, gradients: Tensor, rate: float, step: int, rule: UpdateRule) -> None:
    dim, integers = gradients.shape[1], integer_view(rows)
    row, mean, square = rows[:, : 3 * dim].chunk(3, 1)
    decayed, biases = rule.powers.tables(step, rows)
    if rule.name == "adam":
        # Between two gradients both moments only decay.
        mean_power, square_power = _at(decayed, step - 1 - integers[:, 3 * dim].long())
        mean.mul_(mean_power)
        square.mul_(square_power)
        count = integers.new_full((len(rows),), step)
        integers[:, 3 * dim] = step
    else:
        count = integers[:, UPDATES] + 1
    mean_beta, mean_complement, square_beta, square_complement = rule.constants(rate)
    mean.mul_(mean_beta).add_(gradients * mean_complement)
    square.mul_(square_beta).add_((gradients * gradients).mul_(square_complement))
    row.sub_(_adam_move(mean, square, rate, rule.eps, _at(biases, count.long())))


_RULES = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
    "lazy_adam": _adam,
    "ftrl": _ftrl,
}


def catch_up(slab: Tensor, slots: Tensor, dim: int, step: int, rates: Tensor, *, eps: float, powers: Powers) -> None:
    """Apply dense Adam's updates of rows without a gradient, up to step `step`.

    `rates` [at least step] float64 are the learning rates of all steps. The moments stay those of the last gradient;
    only the row moves, step by step, so the number of calls changes no bit.
    """
    rows = slab[slots]
    row, mean, square = rows[:, :dim], rows[:, dim : 2 * dim], rows[:, 2 * dim : 3 * dim]
    last, since = integer_view(rows)[:, LAST_STEP].long(), integer_view(rows)[:, 3 * dim].long()
    # A row without any gradient so far has zero moments and does not rule.
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


SPARSE_UPDATE = SparseUpdate(update=update, catch_up=catch_up)
