"""One update of the weights: the bound of the norm, its edge, and what a bad norm leaves alone."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from kitforge.core.optim.build import OptimizerConfig, build_optimizer
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.core.optim.schedules import Plateau, ScheduleConfig
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import ALONE
from kitforge.embedding_cache.keys.row_init import RowInitConfig
from kitforge.trainer.optimizer_step import optimizer_step
from kitforge.trainer.precision import GradScaler
from kitforge.trainer.state import TrainingState
from tests.sharded_table import ShardedTable

RATE = 0.5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = ShardedTable(
            RowInitConfig(name="t", dim=3), build_row_optimizer(SparseOptimizerConfig(name="sgd"))
        )
        self.linear = nn.Linear(3, 1)


def state_of(model: nn.Module, precision: str = "fp32", groups: Sequence[ParameterGroup] = ()) -> TrainingState:
    config = OptimizerConfig(name="sgd", learning_rate=RATE, momentum=0.0)
    return TrainingState(
        model=model,
        parallel=parallel_model_of(model, ALONE),
        optimizer=build_optimizer(groups or decay_groups(model.named_parameters(), weight_decay=0.0), config),
        scaler=GradScaler(precision),  # type: ignore[arg-type]
        plateau=Plateau(ScheduleConfig()),
        world=ALONE,
        groups=groups,
    )


def weights(model: Net) -> torch.Tensor:
    table = model.table.rows_of(torch.tensor([3, 5]))
    return torch.cat([table.flatten(), *(parameter.detach().flatten() for parameter in model.parameters())]).double()


def backward(model: Net, scale: float = 1.0) -> None:
    torch.manual_seed(0)
    (model.linear(model.table(torch.tensor([3, 5, 3]))).square().sum() * 1e4 * scale).backward()


def moved(largest_norm: float, precision: str = "fp32") -> tuple[torch.Tensor, float]:
    torch.manual_seed(0)
    model = Net()
    state = state_of(model, precision)
    before = weights(model)
    backward(model, state.scaler.scale)
    norm = optimizer_step(state, 1.0, RATE, largest_norm)[0]["grad_norm"]
    assert (state.updates, state.skipped) == (1, 0)
    return weights(model) - before, norm


def test_the_norm_is_that_of_parameters_and_table_rows_together() -> None:
    way, norm = moved(0.0)
    assert float(way.norm()) == pytest.approx(RATE * norm, rel=1e-4)


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_a_larger_norm_is_scaled_down_for_both_and_keeps_its_direction(share: float) -> None:
    whole, norm = moved(0.0)
    clipped, same = moved(share * norm)
    assert same == norm
    torch.testing.assert_close(clipped, share * whole, rtol=1e-3, atol=1e-5)


def test_a_norm_at_the_bound_changes_no_bit() -> None:
    whole, norm = moved(0.0)
    assert torch.equal(moved(norm)[0], whole)


def test_a_loss_scale_is_taken_out_of_both() -> None:
    torch.testing.assert_close(moved(0.0, "fp16")[0], moved(0.0)[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["parameters", "table"])
def test_a_norm_that_is_not_finite_changes_nothing_and_leaves_no_gradient(bad: float, where: str) -> None:
    torch.manual_seed(0)
    model = Net()
    state = state_of(model)
    before = weights(model)
    backward(model)
    if where == "table":
        model.table.scale_gradients_(bad)
    else:
        assert model.linear.weight.grad is not None
        model.linear.weight.grad.mul_(bad)
    assert not math.isfinite(optimizer_step(state, 1.0, RATE, 1.0)[0]["grad_norm"])
    assert torch.equal(weights(model), before)
    assert (state.updates, state.skipped, state.consecutive_skips) == (0, 1, 1)
    assert float(model.table.squared_norm()) == 0.0 and model.linear.weight.grad is None


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)


@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("own", [None, 0.0, 0.25])
def test_each_part_is_clipped_by_its_own_norm_and_moves_at_its_own_rate(own: float | None, is_alone: bool) -> None:
    torch.manual_seed(0)
    model = Twins()
    model.policy.requires_grad_(not is_alone)
    groups = [
        ParameterGroup(
            names=tuple(name for name, _ in model.named_parameters() if name.startswith(part)),
            parameters=tuple(getattr(model, part).parameters()),
            weight_decay=0.0,
            matrix=False,
            part=part,
            learning_rate=rate,
            max_grad_norm=bound,
        )
        for part, rate, bound in (("policy", None, None), ("critic", 2.0, own))[is_alone:]
    ]
    state = state_of(model, groups=groups)
    before = {part: nn.utils.parameters_to_vector(getattr(model, part).parameters()).detach() for part in PARTS}
    (model.policy(torch.ones(3)).sum() * 30 + model.critic(torch.ones(3)).sum() * 2).backward()  # norms of 60 and 4
    norms, _ = optimizer_step(state, 1.0, RATE, 5.0)
    moved = {
        part: float((nn.utils.parameters_to_vector(getattr(model, part).parameters()) - before[part]).norm().detach())
        for part in PARTS
    }
    expected = {"grad_norm/policy": 60.0, "grad_norm/critic": 4.0, "grad_norm": math.hypot(60, 4)}
    assert norms == pytest.approx({"grad_norm": 4.0} if is_alone else expected, rel=1e-5)
    # Without a bound of its own a part has the run's, 5; 0 is none.
    wanted = {"policy": 0.0 if is_alone else RATE * 5, "critic": 2.0 * (4 if own in (None, 0.0) else 0.25)}
    assert moved == pytest.approx(wanted, rel=1e-4)


PARTS = ("policy", "critic")


def test_one_part_that_is_not_finite_holds_back_all() -> None:
    torch.manual_seed(0)
    model = Twins()
    groups = [
        ParameterGroup(names=(name,), parameters=(each,), weight_decay=0.0, matrix=False, part=name.split(".")[0])
        for name, each in model.named_parameters()
    ]
    state = state_of(model, groups=groups)
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    (model.policy(torch.ones(3)).sum() + model.critic(torch.ones(3)).sum() * math.inf).backward()
    norms, _ = optimizer_step(state, 1.0, RATE, 1.0)
    assert math.isfinite(norms["grad_norm/policy"]) and not math.isfinite(norms["grad_norm"])
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before) and state.skipped == 1
