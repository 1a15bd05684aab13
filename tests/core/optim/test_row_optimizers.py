"""Optimizers over rows against loops over single numbers, and against torch's own on one dense table."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE
from kitforge.core.optim.row_optimizers import RowLayout, RowOptimizer, SparseOptimizerConfig, build_row_optimizer
from kitforge.foundation.errors import ConfigError, ModelError
from tests.row_records import new_records

NUM_ROWS, DIM, NUM_STEPS, RATE = 13, 5, 6, 0.05
RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl")
DTYPES = (torch.float64, torch.float32)
L1, L2, BETA = 0.4, 0.02, 0.5
Numbers = dict[str, np.ndarray]


def rule_of(name: str, eps: float = 1e-6) -> RowOptimizer:
    """The definitions; that the compiled loops have their bits is shown beside the kernels."""
    pulls = {"l1": L1, "l2": L2, "beta": BETA} if name == "ftrl" else {}
    config = SparseOptimizerConfig(name=name, betas=(0.9, 0.99), eps=eps, initial_sum=0.25, **pulls)
    return build_row_optimizer(config, TABLE_REFERENCE)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def rates(count: int) -> Tensor:
    """Up, down, and one step of no rate at all."""
    values = RATE * (1.0 + torch.sin(torch.arange(count, dtype=torch.float64)))
    values[3] = 0.0
    return values


def touched(step: int) -> Tensor:
    """Rows that have a gradient in the step: more or fewer, in no order, so that counts of steps drift apart."""
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(step))
    return order[: 3 + 2 * (step % 4)]


def adam_move(rate: float, mean: np.generic, square: np.generic, count: int) -> np.generic:
    """What a number moves by Adam's formula in its step `count`."""
    kind = type(mean)
    root = np.sqrt(square / kind(1 - 0.99**count)) + kind(1e-6)
    return mean / kind(1 - 0.9**count) * kind(rate) / root


def move_row(name: str, row: np.ndarray, states: Numbers, gradient: np.ndarray, rate: float, count: int) -> None:
    """One row by one step, number by number as the papers have it; `count` is Adam's t."""
    kind = row.dtype.type
    rate = kind(rate)
    if name == "rowwise_adagrad":
        squares = kind(0)
        for each in gradient:
            squares += each * each
        states["sum"][0] += squares / kind(DIM)
    for place, each in enumerate(gradient):
        if name == "sgd":
            row[place] -= each * rate
        elif name == "adagrad":
            states["sum"][place] += each * each
            row[place] -= each * rate / (np.sqrt(states["sum"][place]) + kind(1e-6))
        elif name == "rowwise_adagrad":
            row[place] -= each * (rate / (np.sqrt(states["sum"][0]) + kind(1e-6)))
        elif name == "ftrl":
            total, linear = states["sum"], states["linear"]
            new = total[place] + each * each
            linear[place] += each * rate - (np.sqrt(new) - np.sqrt(total[place])) * row[place]
            total[place] = new
            edge = kind(RATE * L1)
            moved = (np.sign(linear[place]) * edge - linear[place]) / (np.sqrt(new) + kind(BETA + 2.0 * RATE * L2))
            row[place] = kind(0) if abs(linear[place]) <= edge else moved
        else:
            mean, square = states["exp_avg"], states["exp_avg_sq"]
            mean[place] = mean[place] * kind(0.9) + each * kind(1 - 0.9)
            square[place] = square[place] * kind(0.99) + each * each * kind(1 - 0.99)
            row[place] -= adam_move(rate, mean[place], square[place], count)


def by_loop(name: str, dtype: torch.dtype) -> np.ndarray:
    """Rows and states after some steps, by loops over single numbers."""
    rule, layout = rule_of(name), RowLayout(DIM, name)
    slab = new_records(rule, random(NUM_ROWS, DIM, seed=0, dtype=dtype)).numpy()
    for step in range(1, NUM_STEPS + 1):
        for order, slot in enumerate(touched(step).tolist()):
            whole = layout.as_integers(torch.from_numpy(slab[slot])).numpy()
            whole[layout.updates] += 1
            whole[layout.last_step] = step
            states = {key: slab[slot, columns] for key, columns in layout.states.items()}
            gradient = random(len(touched(step)), DIM, seed=100 + step, dtype=dtype).numpy()[order]
            move_row(name, slab[slot, :DIM], states, gradient, RATE, int(whole[layout.updates]))
    return slab


def by_rule(name: str, dtype: torch.dtype, take: Callable[[Tensor], list[Tensor]]) -> np.ndarray:
    """The same steps by the rule; `take` says in which portions the touched rows are handed to it."""
    rule = rule_of(name)
    slab = new_records(rule, random(NUM_ROWS, DIM, seed=0, dtype=dtype))
    for step in range(1, NUM_STEPS + 1):
        chosen, past = touched(step), torch.full((step,), RATE, dtype=torch.float64)
        gradients = random(len(chosen), DIM, seed=100 + step, dtype=dtype)
        for portion in take(torch.arange(len(chosen))):
            rule.catch_up(slab, chosen[portion], step - 1, past)
            rule.update(slab, chosen[portion], gradients[portion], RATE, step)
    return slab.numpy()


def bits(slab: np.ndarray) -> np.ndarray:
    return slab.view(np.int64 if slab.dtype == np.float64 else np.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in RULES if name != "adam"])
def test_has_the_bits_of_a_loop_over_single_numbers(name: str, dtype: torch.dtype) -> None:
    np.testing.assert_array_equal(bits(by_rule(name, dtype, lambda order: [order])), bits(by_loop(name, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(name: str, dtype: torch.dtype) -> None:
    together = bits(by_rule(name, dtype, lambda order: [order]))
    np.testing.assert_array_equal(bits(by_rule(name, dtype, lambda order: list(order.split(1)))), together)
    np.testing.assert_array_equal(bits(by_rule(name, dtype, lambda order: [order.flip(0)])), together)


def torch_optimizer(name: str, weight: torch.nn.Parameter, eps: float) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD([weight], lr=RATE)
        case "adagrad":
            return torch.optim.Adagrad([weight], lr=RATE, initial_accumulator_value=0.25, eps=eps)
        case "lazy_adam":
            return torch.optim.SparseAdam([weight], lr=RATE, betas=(0.9, 0.99), eps=eps)
        case _:
            return torch.optim.Adam([weight], lr=RATE, betas=(0.9, 0.99), eps=eps)


@torch.sparse.check_sparse_tensor_invariants()
def beside_torch(name: str, count: int, choose: Callable[[int], Tensor], eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """A table after so many steps, ours and torch's, where the rate changes from step to step."""
    weight = torch.nn.Parameter(random(NUM_ROWS, DIM, seed=0))
    dense, rule = torch_optimizer(name, weight, eps), rule_of(name, eps)
    slab = new_records(rule, weight.detach().clone())
    for step in range(1, count + 1):
        chosen, rate = choose(step), float(rates(count)[step - 1])
        gradients = random(len(chosen), DIM, seed=step)
        weight.grad = torch.sparse_coo_tensor(chosen.unsqueeze(0), gradients, weight.shape)
        if name != "lazy_adam":
            weight.grad = weight.grad.to_dense()
        dense.param_groups[0]["lr"] = rate
        dense.step()
        rule.catch_up(slab, chosen, step - 1, rates(count))
        rule.update(slab, chosen, gradients, rate, step)
    rule.catch_up(slab, torch.arange(NUM_ROWS), count, rates(count))
    return slab[:, :DIM], weight.detach()


def all_rows(step: int) -> Tensor:
    return torch.arange(NUM_ROWS)


def seldom(step: int) -> Tensor:
    """Rows that rest for long, one that is touched once, and one that never is."""
    return torch.tensor([[0, 3], [5], [7, 1, 2], [11]][step % 4] if step > 40 else [step % 9, 10] if step < 4 else [4])


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("choose", [all_rows, touched, seldom])
def test_equals_torch_on_a_dense_table_over_a_schedule_of_rates(name: str, choose: Callable[[int], Tensor]) -> None:
    found, wanted = beside_torch(name, 130, choose)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_lazy_adam_equals_sparse_adam_where_every_row_is_touched() -> None:
    # SparseAdam adds eps to the root before its correction, Adam and ours after it: so next to none here.
    found, wanted = beside_torch("lazy_adam", 30, all_rows, eps=1e-15)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_lazy_adam_equals_adam_where_every_row_is_touched() -> None:
    slabs = []
    for name in ("lazy_adam", "adam"):
        rule = rule_of(name)
        slab = new_records(rule, random(NUM_ROWS, DIM, seed=0))
        for step in range(1, 30):
            rule.update(slab, all_rows(step), random(NUM_ROWS, DIM, seed=step), float(rates(30)[step]), step)
        slabs.append(slab[:, :DIM])
    assert torch.equal(*slabs)


@pytest.mark.parametrize("fault", ["rates of resting steps", "decay of resting moments"])
def test_a_planted_fault_of_catching_up_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    catch_up = RowOptimizer.catch_up

    def broken(self: RowOptimizer, slab: Tensor, slots: Tensor, step: int, rates: Tensor) -> None:
        past = torch.full_like(rates, float(rates[max(step - 1, 0)])) if fault.startswith("rates") else rates
        layout = self.layout(DIM)
        before = layout.as_integers(slab)[slots, layout.moments_step]
        catch_up(self, slab, slots, step, past)
        if not fault.startswith("rates"):
            layout.as_integers(slab)[slots, layout.moments_step] = torch.where(before > 0, step, before)

    monkeypatch.setattr(RowOptimizer, "catch_up", broken)
    found, wanted = beside_torch("adam", 130, seldom)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)


def test_rows_that_were_not_caught_up_are_refused() -> None:
    rule = rule_of("adam")
    slab = new_records(rule, random(3, DIM, seed=0))
    rule.update(slab, torch.tensor([0, 1]), random(2, DIM, seed=1), RATE, 1)
    before = slab.clone()
    with pytest.raises(ModelError, match="call catch_up"):
        rule.update(slab, torch.tensor([1, 2]), random(2, DIM, seed=2), RATE, 2)
    assert torch.equal(slab, before)
    with pytest.raises(ModelError, match="2 learning rates"):
        rule.catch_up(slab, torch.tensor([1]), 3, rates(9)[:2])


def test_a_row_that_rests_keeps_its_moments_and_its_count() -> None:
    rule, layout = rule_of("lazy_adam"), RowLayout(DIM, "lazy_adam")
    slab, alone = new_records(rule, random(2, DIM, seed=0)), new_records(rule, random(2, DIM, seed=0)[1:])
    for step in range(1, 5):
        chosen = torch.tensor([0, 1] if step == 4 else [0])
        rule.update(slab, chosen, random(1, DIM, seed=step).expand(len(chosen), DIM), RATE, step)
    rule.update(alone, torch.tensor([0]), random(1, DIM, seed=4), RATE, 4)
    assert layout.as_integers(slab)[:, layout.updates].tolist() == [4, 1]
    assert torch.equal(slab[1], alone[0])


def test_the_correction_of_a_count_does_not_depend_on_the_counts_beside_it() -> None:
    rule, layout = rule_of("lazy_adam"), RowLayout(1, "lazy_adam")
    together, alone = (new_records(rule, torch.zeros(2000, 1, dtype=torch.float64)) for _ in range(2))
    for slab, size in ((together, 2000), (alone, 1)):
        layout.as_integers(slab)[:, layout.updates] = torch.arange(2000)
        for portion in torch.arange(2000).split(size):
            rule.update(slab, portion, torch.ones(len(portion), 1, dtype=torch.float64), RATE, 2001)
    assert torch.equal(together, alone)


def tensorflow_ftrl(row: Tensor, gradients: list[Tensor], rate: float) -> tuple[Tensor, Tensor]:
    """A row and its linear state by the formulas of TensorFlow's Ftrl, l2 doubled, with beta beside the root."""
    total, linear = torch.full_like(row, 0.25), torch.zeros_like(row)
    for gradient in gradients:
        new = total + gradient**2
        linear = linear + gradient - (new.sqrt() - total.sqrt()) / rate * row
        quadratic = (BETA + new.sqrt()) / rate + 2.0 * L2
        row = torch.where(linear.abs() > L1, (linear.sign() * L1 - linear) / quadratic, 0.0)
        total = new
    return row, linear


def test_ftrl_is_that_of_tensorflow_at_one_rate() -> None:
    rule, layout = rule_of("ftrl"), RowLayout(DIM, "ftrl")
    slab = new_records(rule, random(3, DIM, seed=0))
    gradients = [0.3 * random(3, DIM, seed=step) for step in range(1, 30)]
    row, linear = tensorflow_ftrl(random(3, DIM, seed=0), gradients, RATE)
    for step, gradient in enumerate(gradients, 1):
        rule.update(slab, torch.arange(3), gradient, RATE, step)
    torch.testing.assert_close(slab[:, :DIM], row, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(slab[:, layout.states["linear"]] / RATE, linear, rtol=1e-11, atol=1e-12)


def test_ftrl_that_pulls_nowhere_is_adagrad_over_a_schedule_of_rates() -> None:
    rows = []
    for name in ("ftrl", "adagrad"):
        rule = build_row_optimizer(SparseOptimizerConfig(name=name, initial_sum=0.25, eps=1e-30), TABLE_REFERENCE)
        slab = new_records(rule, random(3, DIM, seed=0))
        # FTRL begins at the row that its linear state stands for.
        if name == "ftrl":
            slab[:, RowLayout(DIM, name).states["linear"]] = -0.5 * slab[:, :DIM]
        for step in range(1, 30):
            rule.update(slab, torch.arange(3), random(3, DIM, seed=step), float(rates(30)[step]), step)
        rows.append(slab[:, :DIM])
    torch.testing.assert_close(*rows, rtol=1e-11, atol=1e-13)


def test_ftrl_leaves_zeros_where_gradients_are_weak() -> None:
    config = SparseOptimizerConfig(name="ftrl", l1=3.0)
    rule = build_row_optimizer(config, TABLE_REFERENCE)
    slab = new_records(rule, torch.zeros(2, 3))
    gradients = torch.tensor([[0.5, -0.5, 0.0], [2.0, -2.0, 0.1]])
    for step in range(1, 6):
        rule.update(slab, torch.tensor([0, 1]), gradients, RATE, step)
    assert slab[0, :3].tolist() == [0.0, 0.0, 0.0]
    assert [bool(number) for number in slab[1, :3]] == [True, True, False]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "lazy_adam"])
def test_decay_of_touched_rows_is_a_part_of_their_gradient(name: str) -> None:
    decaying = build_row_optimizer(
        SparseOptimizerConfig(name=name, eps=1e-6, touched_weight_decay=0.3), TABLE_REFERENCE
    )
    plain = build_row_optimizer(SparseOptimizerConfig(name=name, eps=1e-6), TABLE_REFERENCE)
    one, other = (new_records(plain, random(4, DIM, seed=0)) for _ in range(2))
    slots, gradients = torch.tensor([2, 0]), random(2, DIM, seed=1)
    decaying.update(one, slots, gradients, RATE, 1)
    plain.update(other, slots, gradients + 0.3 * other[slots, :DIM], RATE, 1)
    torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", RULES)
def test_leaves_gradients_and_visits_alone(name: str) -> None:
    rule, layout = rule_of(name), RowLayout(DIM, name)
    slab, gradients = new_records(rule, random(3, DIM, seed=0)), random(3, DIM, seed=1)
    layout.as_integers(slab)[:, layout.visits] = -9
    given = gradients.clone()
    rule.update(slab, torch.arange(3), gradients, RATE, 1)
    assert torch.equal(gradients, given)
    assert layout.as_integers(slab)[:, layout.visits].tolist() == [-9] * 3
    assert layout.as_integers(slab)[:, layout.updates].tolist() == [1] * 3
    assert layout.as_integers(slab)[:, layout.last_step].tolist() == [1] * 3


@pytest.mark.parametrize("name", RULES)
def test_a_record_is_as_wide_as_what_it_holds(name: str) -> None:
    layout = RowLayout(DIM, name)
    columns = [*range(DIM), *(place for each in layout.states.values() for place in range(each.start, each.stop))]
    columns += [layout.last_step, layout.updates, layout.visits]
    assert columns == list(range(layout.width))
    assert new_records(rule_of(name), torch.ones(2, DIM)).shape == (2, layout.width)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "ftrl"])
def test_sums_start_where_they_were_told_to(name: str) -> None:
    record = new_records(rule_of(name), torch.ones(2, DIM))
    assert (record[:, RowLayout(DIM, name).states["sum"]] == 0.25).all()
    assert record.sum() == 2 * DIM + 0.25 * 2 * (1 if name == "rowwise_adagrad" else DIM)


@pytest.mark.parametrize(
    ("option", "value"),
    [("betas", (0.9,)), ("betas", (0.9, 1.0)), ("eps", 0.0), ("eps", math.inf), ("initial_sum", -0.1)]
    + [("name", "adamm"), ("l1", -1.0), ("l2", math.nan), ("beta", math.inf), ("touched_weight_decay", -0.1)],
)
def test_a_value_out_of_range_is_refused(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        SparseOptimizerConfig(**{option: value})


@pytest.mark.parametrize("name", ["adam", "ftrl"])
def test_a_decay_that_would_mean_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"0 for {name}"):
        SparseOptimizerConfig(name=name, touched_weight_decay=0.1)
