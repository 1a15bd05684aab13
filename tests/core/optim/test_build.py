"""The optimizer of a whole model: what it moves, and that a resume changes no bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.optim.build import Optimizer, OptimizerConfig, build_optimizer
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import CheckpointError, ConfigError, ModelError

NAMES = ["adamw", "muon", "sgd"]


def config(**values: Any) -> OptimizerConfig:
    return from_dict(OptimizerConfig, values, "optimizer")


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """An embedding, two hidden matrices (one with a bias), a norm and a head."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Embedding(11, 8), nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8), nn.Linear(8, 11)]
        return nn.Sequential(*layers).to(dtype)


def groups_of(model: nn.Module, weight_decay: float = 0.1) -> list[ParameterGroup]:
    return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=["0.weight"], heads=["4.weight"])


def optimizer_of(model: nn.Module, **values: Any) -> Optimizer:
    return build_optimizer(groups_of(model), config(**values))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Steps whose data and rate depend on the step's number alone."""
    for step in steps:
        tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
        optimizer.step(1 / (1 + step))
        optimizer.zero_grad()


def snapshot(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in optimizer.tensors()}


def assert_same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_saved_and_loaded_in_the_middle_equals_uninterrupted_bit_for_bit(name: str, cut: int) -> None:
    whole, first, second = model_of(), model_of(), model_of(seed=1)
    uninterrupted, before, after = (optimizer_of(model, name=name) for model in (whole, first, second))
    train(whole, uninterrupted, range(5))
    train(first, before, range(cut))
    second.load_state_dict(first.state_dict())
    after.load(snapshot(before))
    train(second, after, range(cut, 5))
    assert_same_bits(whole.state_dict(), second.state_dict())
    assert_same_bits(snapshot(uninterrupted), snapshot(after))


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_that_loses_one_state_tensor_would_be_seen(name: str) -> None:
    whole, broken = model_of(), model_of()
    uninterrupted, damaged = optimizer_of(whole, name=name), optimizer_of(broken, name=name)
    train(whole, uninterrupted, range(4))
    train(broken, damaged, range(2))
    next(tensor for key, tensor in damaged.tensors() if not key.endswith("step")).zero_()
    train(broken, damaged, range(2, 4))
    assert not all(map(torch.equal, whole.state_dict().values(), broken.state_dict().values()))


@pytest.mark.parametrize("name", NAMES)
def test_materialising_changes_no_parameter_and_no_later_step(name: str) -> None:
    lazy, eager = model_of(), model_of()
    late, early = optimizer_of(lazy, name=name), optimizer_of(eager, name=name)
    early.init_state()
    assert_same_bits(lazy.state_dict(), eager.state_dict())
    train(lazy, late, range(3))
    train(eager, early, range(3))
    early.init_state()
    assert_same_bits(lazy.state_dict(), eager.state_dict())
    assert_same_bits(snapshot(late), snapshot(early))


@pytest.mark.parametrize("name", NAMES)
def test_materialised_states_are_those_that_torch_would_make(name: str) -> None:
    lazy, eager = model_of(), model_of()
    late, early = optimizer_of(lazy, name=name), optimizer_of(eager, name=name)
    early.init_state()
    train(lazy, late, range(1))
    for theirs, ours in zip(late._optimizers, early._optimizers, strict=True):
        for old, new in zip(theirs.state.values(), ours.state.values(), strict=True):
            assert {key: (value.shape, value.dtype, value.device) for key, value in old.items()} == {
                key: (value.shape, value.dtype, value.device) for key, value in new.items()
            }


@pytest.mark.parametrize(
    ("name", "matrix_keys", "vector_keys"),
    [
        ("adamw", ["exp_avg", "exp_avg_sq", "step"], ["exp_avg", "exp_avg_sq", "step"]),
        ("muon", ["momentum"], ["exp_avg", "exp_avg_sq", "step"]),
        ("sgd", ["momentum_buffer"], ["momentum_buffer"]),
    ],
)
def test_states_are_named_after_parameters_in_the_order_of_the_groups(
    name: str, matrix_keys: list[str], vector_keys: list[str]
) -> None:
    expected = [f"{parameter}.{key}" for parameter in ["1.weight", "3.weight"] for key in matrix_keys]
    others = ["4.weight", "0.weight", "1.bias", "2.weight", "2.bias", "3.bias", "4.bias"]
    expected += [f"{parameter}.{key}" for parameter in others for key in vector_keys]
    assert [key for key, _ in optimizer_of(model_of(), name=name).tensors()] == expected


def test_sgd_without_momentum_has_no_state() -> None:
    model = model_of()
    optimizer = optimizer_of(model, name="sgd", momentum=0.0)
    train(model, optimizer, range(2))
    assert snapshot(optimizer) == {}
    optimizer.load({})


def test_fused_adamw_equals_its_formula_in_float64() -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3))
    group = ParameterGroup(names=("w",), parameters=(weight,), weight_decay=0.3, matrix=True)
    optimizer = build_optimizer([group], config(learning_rate=0.1, betas=[0.8, 0.9], eps=1e-3))
    expected, mean, square = weight.detach().clone(), torch.zeros(2, 3).double(), torch.zeros(2, 3).double()
    for count, scale in enumerate([1.0, 0.5, 0.25], start=1):
        gradient = torch.sin(count * torch.arange(6.0, dtype=torch.float64)).reshape(2, 3)
        weight.grad = gradient.clone()
        optimizer.step(scale)
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient**2
        rate = 0.1 * scale
        expected = expected - rate * 0.3 * expected
        expected = expected - rate * (mean / (1 - 0.8**count)) / ((square / (1 - 0.9**count)).sqrt() + 1e-3)
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-13, atol=1e-15)


def test_muon_moves_matrices_in_its_way_and_the_rest_as_adamw() -> None:
    mixed, plain = model_of(), model_of()
    train(mixed, optimizer_of(mixed, name="muon"), range(1))
    train(plain, optimizer_of(plain, name="adamw"), range(1))
    for name, _ in model_of().named_parameters():
        ours, theirs = (model.get_parameter(name) for model in (mixed, plain))
        if name in ("1.weight", "3.weight"):
            assert not torch.equal(ours, theirs)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_scale_zero_moves_nothing(name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, name=name)
    for parameter in optimizer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(0.0)
    assert_same_bits(model.state_dict(), model_of().state_dict())


@pytest.mark.parametrize("name", NAMES)
def test_only_decayed_groups_decay(name: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model, name=name, learning_rate=0.5)
    for parameter in optimizer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(1.0)
    for parameter_name, start in model_of().named_parameters():
        decays = parameter_name in ("1.weight", "3.weight", "4.weight")
        torch.testing.assert_close(model.get_parameter(parameter_name), start * (0.95 if decays else 1.0))


def test_zero_grad_lets_go_of_gradients() -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    for parameter in optimizer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_parameters_come_in_the_order_of_the_groups() -> None:
    model = model_of()
    expected = [parameter for group in groups_of(model) for parameter in group.parameters]
    got = list(optimizer_of(model, name="muon").parameters())
    assert all(first is second for first, second in zip(got, expected, strict=True))


def test_bf16_parameters_keep_bf16_states_and_float32_counters() -> None:
    states = snapshot(optimizer_of(model_of(dtype=torch.bfloat16)))
    assert states["1.weight.exp_avg"].dtype == torch.bfloat16
    assert states["1.weight.step"].dtype == torch.float32
    assert states["1.weight.step"].shape == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda states: states.pop("1.weight.exp_avg"), "1 missing: 1.weight.exp_avg"),
        (lambda states: states.update(more=torch.ones(1)), "1 unexpected: more"),
        (
            lambda states: states.update({"2.bias.exp_avg": torch.zeros(3)}),
            r"1 misshapen: 2.bias.exp_avg \(\[3\] float32, not \[24\] float32\)",
        ),
        (
            lambda states: states.update({"2.bias.step": torch.zeros((), dtype=torch.int64)}),
            r"2.bias.step \(\[\] int64, not \[\] float32\)",
        ),
        (lambda states: states.clear(), "27 missing: .* and 19 more"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changed(change: Any, message: str) -> None:
    model = model_of()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    before = snapshot(optimizer)
    states = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    change(states)
    with pytest.raises(CheckpointError, match=message):
        optimizer.load(states)
    assert_same_bits(before, snapshot(optimizer))


def test_loading_copies() -> None:
    optimizer = optimizer_of(model_of())
    states = snapshot(optimizer)
    optimizer.load(states)
    states["1.weight.exp_avg"].fill_(1.0)
    assert not snapshot(optimizer)["1.weight.exp_avg"].any()


@pytest.mark.parametrize(
    "values",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"weight_decay": -0.1},
        {"betas": [0.9]},
        {"betas": [0.9, 1.0]},
        {"eps": 0.0},
        {"momentum": 1.0},
        {"name": "adam"},
        {"lr": 0.1},
    ],
)
def test_an_option_out_of_range_is_refused_by_name(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer.{next(iter(values))}"):
        config(**values)


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer.name=adamw"):
        build_optimizer(vectors(), config(name="muon"))


def vectors() -> list[ParameterGroup]:
    return decay_groups([("bias", nn.Parameter(torch.ones(3)))], weight_decay=0.1)


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameter"):
        build_optimizer([], config())


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="twice.*\n.*bias"):
        build_optimizer([*vectors(), *vectors()], config())
