"""A step's micro-batches: losses of a task's own, and those made of a network's inputs and its hidden states."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.parallel.world import World
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import TrainingError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task

OPTIONS = {"trainer": {"max_steps": 3}, "optimizer": {"learning_rate": 0.1}}


class Network(nn.Module):
    """Keeps the contexts that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.contexts: list[Context] = []

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        self.contexts += [] if context is None else [context]
        output: Tensor = self.layer(tokens)
        return output


class Data(Task):
    """Steps of two micro-batches, of three rows and of one."""

    def build(self, world: World) -> nn.Module:
        torch.manual_seed(1)
        return Network()

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 100):
            rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            yield [{"rows": rows[:3], "step": step}, {"rows": rows[3:], "step": step}]


class Whole(Data):
    def loss(self, model: Any, micro_batch: MicroBatch) -> Sums:
        return {"loss": model.layer(micro_batch["rows"]).square().sum()}


class Split(Data):
    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Context]:
        return micro_batch["rows"], Context(dropout=DropoutKey(seed=0, step=micro_batch["step"], samples=(0,)))

    def loss_of(self, model: nn.Module, hidden: Tensor, micro_batch: MicroBatch) -> Sums:
        return {"loss": hidden.square().sum()}


class Overridden(Split):
    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": 3 * super().loss(model, micro_batch)["loss"]}


def trained(task: Task, precision: str = "fp32") -> Loop:
    options = from_dict(RunOptions, OPTIONS | {"precision": precision})
    loop = Loop(task, options, World(device=torch.device("cpu")))
    loop.train()
    return loop


def weights(loop: Loop) -> Tensor:
    return torch.cat([each.detach().flatten() for each in loop.model.parameters()])


def test_a_task_with_a_loss_of_its_own_is_trained_by_that() -> None:
    task = Whole()
    network: Any = task.build(World(device=torch.device("cpu")))
    for micro_batch in next(iter(task.steps(network, Cursor()))):
        (task.loss(network, micro_batch)["loss"] / 4).backward()
    first: Any = {}

    class Watched(Whole):
        def skip_reason(self, sums: Sums, counts: Sums) -> str | None:
            first.setdefault("gradient", loop.model.layer.weight.grad.clone())  # type: ignore[union-attr, operator]
            return None

    loop = Loop(Watched(), from_dict(RunOptions, OPTIONS), World(device=torch.device("cpu")))
    loop.train()
    assert torch.equal(first["gradient"], network.layer.weight.grad)


def test_inputs_and_the_loss_of_hidden_states_train_as_one_loss() -> None:
    assert torch.equal(weights(trained(Split())), weights(trained(Whole())))


def test_a_loss_of_its_own_comes_before_inputs() -> None:
    assert not torch.equal(weights(trained(Overridden())), weights(trained(Split())))


@pytest.mark.parametrize(("precision", "scale"), [("fp32", 1.0), ("fp16", 65536.0)])
def test_a_forward_pass_knows_the_weight_of_its_loss(precision: str, scale: float) -> None:
    network: Any = trained(Split(), precision).model
    assert [float(each.loss_weight) for each in network.contexts[:2]] == [scale / 4] * 2


def test_an_evaluation_has_neither_dropout_nor_a_weight() -> None:
    task = Split()
    network: Any = task.build(World(device=torch.device("cpu"))).eval()
    task.loss(network, next(iter(task.steps(network, Cursor())))[0])
    assert network.contexts[0].dropout is None
    assert network.contexts[0].loss_weight is None


def test_a_task_without_any_loss_is_refused() -> None:
    with pytest.raises(TrainingError, match="Data.*gives no loss"):
        trained(Data())
