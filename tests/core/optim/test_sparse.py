"""Optimizers over rows against loops over single numbers, and against torch where every row is touched."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.optim.sparse import RowOptimizer, SparseOptimizerConfig, build_row_optimizer
from kitforge.foundation.errors import ConfigError

NUM_ROWS, DIM, NUM_STEPS, RATE = 13, 5, 6, 0.05
RULES = ("sgd", "adagrad", "adam")
DTYPES = (torch.float64, torch.float32)
Numbers = dict[str, np.ndarray]


def config(name: str) -> SparseOptimizerConfig:
    return SparseOptimizerConfig(name=name, betas=(0.9, 0.99), eps=1e-6, initial_sum=0.25)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def touched(step: int) -> Tensor:
    """Rows that have a gradient in the step: more or fewer, in no order, so that counts of steps drift apart."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(step))
    return order[: 3 + 2 * (step % 4)]


def move_number(name: str, row: np.ndarray, states: Numbers, place: tuple[int, int], gradient: np.generic) -> None:
    """One number of a table by one step, written as the papers have it; `step` was counted already."""
    kind = row.dtype.type
    if name == "sgd":
        row[place] -= gradient * kind(RATE)
    elif name == "adagrad":
        states["sum"][place] += gradient * gradient
        row[place] -= gradient * kind(RATE) / (np.sqrt(states["sum"][place]) + kind(1e-6))
    else:
        mean, square, count = states["exp_avg"], states["exp_avg_sq"], int(states["step"][place[0]])
        mean[place] = mean[place] * kind(0.9) + gradient * kind(1 - 0.9)
        square[place] = square[place] * kind(0.99) + gradient * gradient * kind(1 - 0.99)
        root = np.sqrt(square[place] / kind(1 - 0.99**count)) + kind(1e-6)
        row[place] -= mean[place] / kind(1 - 0.9**count) * kind(RATE) / root


def start(name: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """Rows and their states; Adam's rows have been touched differently often, so that powers of all sizes are taken."""
    states = build_row_optimizer(config(name)).states(NUM_ROWS, DIM, dtype)
    if name == "adam":
        states["step"] += 7 * torch.arange(NUM_ROWS)
    return random(NUM_ROWS, DIM, seed=0, dtype=dtype), states


def by_loop(name: str, dtype: torch.dtype) -> Numbers:
    first_rows, first_states = start(name, dtype)
    rows, states = first_rows.numpy(), {key: state.numpy() for key, state in first_states.items()}
    for step in range(NUM_STEPS):
        chosen = touched(step).tolist()
        gradients = random(len(chosen), DIM, seed=100 + step, dtype=dtype).numpy()
        for order, row in enumerate(chosen):
            if name == "adam":
                states["step"][row] += 1
            for dim in range(DIM):
                move_number(name, rows, states, (row, dim), gradients[order, dim])
    return {"rows": rows, **states}


def by_rule(name: str, dtype: torch.dtype, take: Callable[[Tensor], list[Tensor]]) -> Numbers:
    """The same steps by the rule; `take` says in which portions the touched rows are handed to it."""
    rule = build_row_optimizer(config(name))
    rows, states = start(name, dtype)
    for step in range(NUM_STEPS):
        chosen = touched(step)
        gradients = random(len(chosen), DIM, seed=100 + step, dtype=dtype)
        for portion in take(torch.arange(len(chosen))):
            places = chosen[portion]
            gathered, moved = rows[places], {key: state[places] for key, state in states.items()}
            rule.update(gathered, moved, gradients[portion], RATE)
            rows[places] = gathered
            for key, state in states.items():
                state[places] = moved[key]
    return {"rows": rows.numpy(), **{key: state.numpy() for key, state in states.items()}}


def assert_same_bits(one: Numbers, other: Numbers) -> None:
    assert one.keys() == other.keys()
    for key in one:
        assert one[key].dtype == other[key].dtype
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_has_the_bits_of_a_loop_over_single_numbers(name: str, dtype: torch.dtype) -> None:
    assert_same_bits(by_rule(name, dtype, lambda order: [order]), by_loop(name, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(name: str, dtype: torch.dtype) -> None:
    together = by_rule(name, dtype, lambda order: [order])
    assert_same_bits(by_rule(name, dtype, lambda order: list(order.split(1))), together)
    assert_same_bits(by_rule(name, dtype, lambda order: [order.flip(0)]), together)


@pytest.mark.parametrize("name", RULES)
def test_equals_torch_where_every_row_is_touched(name: str) -> None:
    weight = torch.nn.Parameter(random(NUM_ROWS, DIM, seed=0))
    dense: torch.optim.Optimizer
    if name == "sgd":
        dense = torch.optim.SGD([weight], lr=RATE)
    elif name == "adagrad":
        dense = torch.optim.Adagrad([weight], lr=RATE, initial_accumulator_value=0.25, eps=1e-6)
    else:
        dense = torch.optim.Adam([weight], lr=RATE, betas=(0.9, 0.99), eps=1e-6)
    rule = build_row_optimizer(config(name))
    rows, states = weight.detach().clone(), rule.states(NUM_ROWS, DIM, torch.float64)
    for step in range(NUM_STEPS):
        weight.grad = random(NUM_ROWS, DIM, seed=step + 1)
        dense.step()
        rule.update(rows, states, weight.grad, RATE)
    # torch fuses some products with sums, which rounds once less.
    torch.testing.assert_close(rows, weight.detach(), rtol=1e-14, atol=1e-15)


def test_a_row_that_rests_keeps_its_moments_and_its_count() -> None:
    rule = build_row_optimizer(config("adam"))
    rows, states = random(2, DIM, seed=0), rule.states(2, DIM, torch.float64)
    alone, own = rows[1:].clone(), rule.states(1, DIM, torch.float64)
    for step in range(4):
        gradient = random(1, DIM, seed=step + 1)
        rule.update(rows[:1], {key: state[:1] for key, state in states.items()}, gradient, RATE)
        if step == 3:
            rule.update(rows[1:], {key: state[1:] for key, state in states.items()}, gradient, RATE)
            rule.update(alone, own, gradient, RATE)
    assert states["step"].tolist() == [4, 1]
    assert torch.equal(rows[1:], alone)


def test_the_correction_of_a_count_does_not_depend_on_the_counts_beside_it() -> None:
    rule = build_row_optimizer(SparseOptimizerConfig(name="adam"))
    together, alone = torch.zeros(2, 2000, 1, dtype=torch.float64)
    gradients = torch.ones(2000, 1, dtype=torch.float64)
    for rows, size in ((together, 2000), (alone, 1)):
        states = rule.states(2000, 1, torch.float64)
        states["step"] += torch.arange(2000)
        for portion in torch.arange(2000).split(size):
            part = slice(int(portion[0]), int(portion[-1]) + 1)
            rule.update(rows[part], {key: state[part] for key, state in states.items()}, gradients[part], RATE)
    assert torch.equal(together, alone)


@pytest.mark.parametrize("name", RULES)
def test_moves_in_place_and_leaves_gradients_alone(name: str) -> None:
    rule = build_row_optimizer(config(name))
    rows, states, gradients = random(3, DIM, seed=0), rule.states(3, DIM, torch.float64), random(3, DIM, seed=1)
    before, given = rows.clone(), gradients.clone()
    rule.update(rows, states, gradients, RATE)
    assert bool((rows != before).all())
    assert torch.equal(gradients, given)


@pytest.mark.parametrize("name", RULES)
def test_takes_no_rows(name: str) -> None:
    rule: RowOptimizer = build_row_optimizer(config(name))
    rule.update(torch.empty(0, DIM), rule.states(0, DIM), torch.empty(0, DIM), RATE)


def test_adagrad_starts_from_the_sum_it_was_given() -> None:
    assert build_row_optimizer(config("adagrad")).states(2, 3)["sum"].tolist() == [[0.25] * 3] * 2


@pytest.mark.parametrize(
    ("option", "value"),
    [("betas", (0.9,)), ("betas", (0.9, 1.0)), ("eps", 0.0), ("eps", math.inf), ("initial_sum", -0.1)],
)
def test_a_value_out_of_range_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        SparseOptimizerConfig(**{option: value})
