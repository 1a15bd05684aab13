"""Rules by which rows move: the compiled ones have the bits of their definitions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE, TableKernels
from kitforge.core.kernels.sparse_update import numba as fast
from kitforge.core.kernels.sparse_update import reference
from kitforge.core.kernels.sparse_update.reference import Powers
from kitforge.core.optim.row_optimizers import RowOptimizer, SparseOptimizerConfig, build_row_optimizer
from kitforge.foundation.errors import ModelError
from tests.core.kernels.records import FAST, KERNELS, have_same_bits, normal, seeded, threads
from tests.row_records import new_records

RULES = ("sgd", "adagrad", "rowwise_adagrad", "adam", "lazy_adam", "ftrl")
NUM_ROWS, NUM_STEPS = 40, 9
CONFIGS = {name: SparseOptimizerConfig(name=name, eps=1e-6, initial_sum=0.1) for name in RULES}
DECAYING = {
    f"{name}_decaying": SparseOptimizerConfig(name=name, eps=1e-6, touched_weight_decay=0.1)
    for name in ("sgd", "adagrad", "rowwise_adagrad", "lazy_adam")
}
CONFIGS |= DECAYING
CONFIGS["ftrl_pulled"] = SparseOptimizerConfig(name="ftrl", initial_sum=1.0, l1=0.7, l2=0.1, beta=1.0)
CONFIGS["adam_unbounded"] = SparseOptimizerConfig(name="adam", betas=(0.9, 0.5))
CONFIGS["adam_quick"] = SparseOptimizerConfig(name="adam", betas=(0.5, 0.9), eps=1e-3)


def rates_of(count: int) -> Tensor:
    """A schedule that warms up, falls, and has a step of no rate at all."""
    steps = torch.arange(count, dtype=torch.float64)
    rates = 0.1 * torch.minimum((steps + 1) / 4, 0.99**steps)
    rates[5] = 0.0
    return rates


def touched(step: int) -> Tensor:
    return torch.randperm(NUM_ROWS, generator=seeded(step))[: 3 + 9 * (step % 3)]


def train(
    kernels: TableKernels,
    config: SparseOptimizerConfig,
    dim: int,
    dtype: torch.dtype,
    change: Callable[[Tensor], Tensor] = lambda gradients: gradients,
    rest: int = 300,
) -> Tensor:
    """The slab after some steps and a rest, which is long enough for every row to come to a stop."""
    rule = build_row_optimizer(config, kernels)
    slab, last = new_records(rule, normal(NUM_ROWS, dim, dtype=dtype)), NUM_STEPS + rest
    slab[:, rule.layout(dim).visits] = torch.nan
    rates = rates_of(last)
    for step in range(1, NUM_STEPS + 1):
        slots = touched(step)
        rule.catch_up(slab, slots, step - 1, rates)
        gradients = change(normal(len(slots), dim, dtype=dtype, seed=step))
        rule.update(slab, slots, gradients, float(rates[step - 1]), step)
    rule.catch_up(slab, torch.arange(0, NUM_ROWS, 2), last, rates)
    return slab


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 1), (torch.float32, 19), (torch.float64, 5)])
@pytest.mark.parametrize("name", CONFIGS)
def test_has_the_bits_of_the_reference(name: str, dtype: torch.dtype, dim: int) -> None:
    found = train(FAST, CONFIGS[name], dim, dtype)
    assert have_same_bits(
        reference.integer_view(found), reference.integer_view(train(TABLE_REFERENCE, CONFIGS[name], dim, dtype))
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_threads_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(FAST, CONFIGS[name], 19, torch.float32)
    monkeypatch.setattr(fast, "GRAIN", 16)
    for count in (2, 3):
        with threads(count):
            assert have_same_bits(
                reference.integer_view(train(FAST, CONFIGS[name], 19, torch.float32)), reference.integer_view(alone)
            )


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_finite_stays_in_its_row_and_is_not_hidden(name: str, kernels: str) -> None:
    rule, slots = build_row_optimizer(CONFIGS[name], KERNELS[kernels]), torch.tensor([3, 0, 2])
    slab, gradients = new_records(rule, normal(4, 5)), normal(3, 5, seed=1)
    clean = slab.clone()
    rule.update(clean, slots, gradients, 0.1, 1)
    gradients[0, 1], gradients[2, 4] = torch.nan, torch.inf
    rule.update(slab, slots, gradients, 0.1, 1)
    assert have_same_bits(slab[:2], clean[:2])
    assert not slab[3, 1].isfinite()
    assert not slab[2, : rule.layout(5).last_step].isfinite().all()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_no_rows_and_no_other_rows_move(name: str, kernels: str) -> None:
    rule = build_row_optimizer(CONFIGS[name], KERNELS[kernels])
    slab, none = new_records(rule, normal(4, 5)), torch.empty(0, dtype=torch.int64)
    before = slab.clone()
    rule.catch_up(slab, none, 3, rates_of(9))
    rule.update(slab, none, torch.empty(0, 5), 0.1, 1)
    assert have_same_bits(slab, before)
    rule.update(slab, torch.tensor([2]), torch.ones(1, 5), 0.1, 1)
    assert have_same_bits(slab[[0, 1, 3]], before[[0, 1, 3]])
    assert not torch.equal(slab[2, :5], before[2, :5])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", RULES)
def test_a_slot_outside_is_refused_before_any_row_moves(name: str, kernels: str) -> None:
    rule = build_row_optimizer(CONFIGS[name], KERNELS[kernels])
    slab = new_records(rule, normal(4, 5))
    before = slab.clone()
    for slot in (-1, 4):
        with pytest.raises(ModelError, match="slots of the slab"):
            rule.update(slab, torch.tensor([1, slot]), torch.ones(2, 5), 0.1, 1)
        if rule.moves_untouched_rows:
            with pytest.raises(ModelError, match="slots of the slab"):
                rule.catch_up(slab, torch.tensor([1, slot]), 3, rates_of(9))
    assert have_same_bits(slab, before)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "ftrl"])
def test_gradients_may_be_views(name: str) -> None:
    config = CONFIGS[name]
    as_views = train(FAST, config, 5, torch.float32, lambda gradients: gradients.t().contiguous().t())
    assert have_same_bits(as_views, train(FAST, config, 5, torch.float32))


@pytest.mark.parametrize("name", ["adagrad", "adam", "lazy_adam", "ftrl"])
def test_one_unit_in_the_last_place_of_a_root_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    root = reference._root
    monkeypatch.setattr(reference, "_root", lambda squares: torch.nextafter(root(squares), torch.ones(())))
    wanted = train(TABLE_REFERENCE, CONFIGS[name], 19, torch.float32)
    assert not have_same_bits(
        reference.integer_view(train(FAST, CONFIGS[name], 19, torch.float32)), reference.integer_view(wanted)
    )


def caught_up(rule: RowOptimizer, slab: Tensor, stops: list[int], rates: Tensor) -> Tensor:
    """The slab where its rows were told up to each of these steps."""
    slab = slab.clone()
    for stop in stops:
        rule.catch_up(slab, torch.arange(len(slab)), stop, rates)
    return slab


@pytest.mark.parametrize("name", ["adam", "adam_quick", "adam_unbounded"])
def test_it_does_not_matter_in_how_many_calls_rows_catch_up(name: str) -> None:
    rule, rates = build_row_optimizer(CONFIGS[name], FAST), rates_of(700)
    slab = new_records(rule, normal(NUM_ROWS, 6) * 1e-3)
    for step in range(1, 4):
        slots = touched(step)
        rule.catch_up(slab, slots, step - 1, rates)
        rule.update(slab, slots, normal(len(slots), 6, seed=step), 0.1, step)
    at_once = caught_up(rule, slab, [700], rates)
    for stops in ([10, 11, 250, 700], list(range(3, 701))):
        assert have_same_bits(
            reference.integer_view(caught_up(rule, slab, stops, rates)), reference.integer_view(at_once)
        )


def test_a_row_that_stops_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loops as Python runs them, so that one of them can be exchanged.
    monkeypatch.setattr(fast, "_catch_up", fast._catch_up.py_func)
    monkeypatch.setattr(fast, "_prefetch_row", lambda *_: None)
    wanted = train(TABLE_REFERENCE, CONFIGS["adam"], 2, torch.float32)
    for is_at_rest, is_right in ((fast._is_stationary.py_func, True), (lambda *_: True, False)):
        monkeypatch.setattr(fast, "_is_stationary", is_at_rest)
        found = train(FAST, CONFIGS["adam"], 2, torch.float32)
        assert have_same_bits(reference.integer_view(found), reference.integer_view(wanted)) == is_right


def test_a_count_of_updates_that_cannot_be_is_refused() -> None:
    rule = build_row_optimizer(CONFIGS["lazy_adam"], FAST)
    slab = new_records(rule, normal(2, 3))
    rule.layout(3).as_integers(slab)[1, rule.layout(3).updates] = 10**6
    with pytest.raises(ModelError, match="more updates than there were steps"):
        rule.update(slab, torch.tensor([0, 1]), torch.ones(2, 3), 0.1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["adam", "lazy_adam"])
def test_powers_end_where_they_are_zero_and_no_bit_shows_it(
    name: str, dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, num_steps = SparseOptimizerConfig(name=name, betas=(0.5, 0.6)), 2000
    rates = torch.full((num_steps,), 0.01, dtype=torch.float64)

    def moved() -> tuple[Tensor, Tensor]:
        """Rows with any number of updates, the last of them any number of steps ago, after one more."""
        rule, dim = build_row_optimizer(config, KERNELS[kernels]), 3
        slab, layout = new_records(rule, normal(100, dim, dtype=dtype)), rule.layout(dim)
        slab[:, dim : 3 * dim] = normal(100, 2 * dim, dtype=dtype, seed=1).abs() * 1e30
        counts = torch.linspace(1, num_steps - 1, 100).to(torch.int64)
        layout.as_integers(slab)[:, layout.updates] = counts.to(layout.as_integers(slab).dtype)
        layout.as_integers(slab)[:, layout.last_step] = counts.flip(0).to(layout.as_integers(slab).dtype)
        if layout.moments_step is not None:
            layout.as_integers(slab)[:, layout.moments_step] = counts.flip(0).to(layout.as_integers(slab).dtype)
        slots = torch.arange(100)
        rule.catch_up(slab, slots, num_steps - 1, rates)
        rule.update(slab, slots, normal(100, dim, dtype=dtype, seed=2), 0.01, num_steps)
        return slab, rule._rule.powers.tables(num_steps, slab)[0]

    bounded, short = moved()
    monkeypatch.setattr(Powers, "_end", lambda *_: 10**9)
    unbounded, long = moved()
    assert short.shape[1] < num_steps < long.shape[1]
    assert have_same_bits(reference.integer_view(bounded), reference.integer_view(unbounded))
    # And not because no power matters here: with the first that is left out as one, bits differ.
    monkeypatch.setattr(Powers, "_end", lambda *_: 20)
    assert not have_same_bits(reference.integer_view(moved()[0]), reference.integer_view(bounded))


def test_tables_of_powers_do_not_grow_with_the_steps() -> None:
    powers, slab = Powers((0.9, 0.999)), torch.empty(0)
    kept, biases = powers.tables(10**7, slab)
    assert kept.shape[1] < 110_000
    assert kept[:, -1].tolist() == [0.0, 0.0]
    assert biases[:, -1].tolist() == [1.0, 1.0]
    assert powers.tables(10**9, slab)[0] is kept
    assert have_same_bits(kept[1, :3], torch.tensor([1.0, 0.999, 0.999**2], dtype=torch.float64).float())


def test_rates_from_before_all_rows_are_not_looked_at() -> None:
    rule = build_row_optimizer(CONFIGS["adam"], FAST)
    slab, rates = new_records(rule, normal(6, 3)), rates_of(4000)
    for step in (1, 3990):
        rule.catch_up(slab, torch.arange(6), step - 1, rates)
        rule.update(slab, torch.arange(6), normal(6, 3, seed=step), 0.1, step)
    other, asked = slab.clone(), rates.clone()
    # Their past has been told: whatever it was, it changes nothing.
    asked[:3989] = torch.nan
    rule.catch_up(slab, torch.arange(5), 4000, rates)
    rule.catch_up(other, torch.arange(5), 4000, asked)
    assert have_same_bits(reference.integer_view(slab), reference.integer_view(other))
