"""What a rank does of a step on stages, with stand-ins for the ranks beside it: no messages, real gradients."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kitforge.core.nn.context import Context
from kitforge.core.parallel import collectives, micro_batches, parallelize
from kitforge.core.parallel.expert_load import LOAD
from kitforge.core.parallel.micro_batches import Losses, run_micro_batches
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.schedules import Pipeline
from kitforge.core.parallel.stage import Flight
from kitforge.foundation.types import Sums


class Line(Losses):
    """A weight times the number of a micro-batch."""

    def inputs(self, micro_batch: Any) -> tuple[torch.Tensor, Context]:
        return micro_batch["number"], Context()

    def loss_of(self, model: torch.nn.Module, hidden: torch.Tensor, micro_batch: Any) -> Sums:
        return {"loss": hidden}


class LastOfTwo:
    """The second of two stages; it notes its passes."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self.column = SimpleNamespace(index=0, pipeline=Pipeline(2), last=1, group="column")
        self.last = 0
        self.weight, self.passes = weight, list[str]()

    def has_backward(self, _stage: int) -> bool:
        return True

    def layers(self, _stage: int) -> None:
        return None

    def forward(self, stage: int, number: torch.Tensor, _context: Context) -> Flight:
        self.passes.append("F")
        return Flight(stage=stage, stream=None, output=self.weight * number, sent=None)

    def backward(self, flight: Flight) -> None:
        self.passes.append("B")
        flight.output.backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self.passes.append("end")


def step_of(monkeypatch: pytest.MonkeyPatch, count: int) -> tuple[LastOfTwo, Sums, list[Any]]:
    """The stage after the step, the sums of it, and what it announced and sent."""
    weight, sent = torch.nn.Parameter(torch.tensor(2.0)), list[Any]()
    stage, model = LastOfTwo(weight), torch.nn.Module()

    def broadcast(value: list[Sums], group: str, source: int) -> list[Sums]:
        sent.append((len(value), group, source))
        return [{"loss": torch.tensor(100.0)}]

    monkeypatch.setattr(collectives, "broadcast_object", broadcast)
    monkeypatch.setattr(micro_batches, "load_of", lambda *_, **__: {LOAD: torch.tensor(10.0 ** len(stage.passes))})
    parallel: Any = SimpleNamespace(
        model=model,
        mesh=None,
        experts={},
        slices_pay=False,
        relays={model: SimpleNamespace(stages=stage)},
        weight_gradients=None,
        device=torch.device("cpu"),
        loss_fraction=0.5,
        scheduled=contextlib.nullcontext,
        micro_batch=lambda is_last: sent.append(is_last),
        reduce_gradients=lambda: sent.append("reduced"),
    )
    step: Any = [{"number": torch.tensor(float(number))} for number in range(1, count + 1)]
    return stage, run_micro_batches(parallel, Line(), step, 4.0, contextlib.nullcontext), sent


def test_every_micro_batch_of_a_stage_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, sent = step_of(monkeypatch, 3)
    assert stage.passes == ["F", "F", "B", "F", "B", "B", "end"]
    assert float(stage.weight.grad) == (1 + 2 + 3) * 4.0 * 0.5  # type: ignore[arg-type]
    # Announced before the first forward pass, and before each backward pass; reduced when all have ended.
    assert [each for each in sent if isinstance(each, bool)] == [False, False, False, True]
    assert sent[-1] == "reduced"


def test_a_step_of_few_micro_batches_says_how_long_its_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said = list[str]()
    monkeypatch.setattr(micro_batches, "warn_once", lambda _log, message: said.append(message))
    step_of(monkeypatch, 2)
    assert not said
    step_of(monkeypatch, 1)
    (message,) = said
    assert "fewer micro-batches (1) than stages (2), so that a rank waits 50% of it" in message
    assert "trainer.micro_batch_size" in message


def test_sums_are_those_that_the_last_stage_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    _, sums, sent = step_of(monkeypatch, 3)
    assert float(sums["loss"]) == 100.0
    assert (3, "column", 1) in sent


def test_the_load_of_experts_is_read_right_after_its_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # After 1, 2 and 4 passes: a pass later it would be that of another micro-batch, or of a recomputation.
    assert float(step_of(monkeypatch, 3)[1][LOAD]) == 10.0 + 100.0 + 10_000.0


def test_the_gradient_of_several_stages_is_summed_over_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[Any] = []
    monkeypatch.setattr(parallelize, "all_reduce_partial", lambda members, group: summed.append((members, group)))
    stages = {"tied": (0, 2), "block": (2,), "score": None, "other": (1,), "bias": None}
    groups = {(0, 2): "ends", None: "column", (2,): None}
    parallel: Any = SimpleNamespace(
        mesh=SimpleNamespace(column=SimpleNamespace(group_of=groups.get)),
        dtypes=dict.fromkeys(stages),
        layouts={name: SimpleNamespace(stages=each) for name, each in stages.items()},
        _held={name: name for name in stages if name != "other"},
    )
    ParallelModel._sum_over_stages(parallel)
    assert summed == [(["tied"], "ends"), (["score", "bias"], "column")]


def test_stages_that_take_turns_begin_with_a_part_of_the_loss_each() -> None:
    degrees = {"context": 2, "pipeline": 3}
    for takes_turns, wanted in ((True, 1 / 6), (False, 1 / 2)):
        parallel: Any = SimpleNamespace(mesh=SimpleNamespace(degree=degrees.get), takes_turns=takes_turns)
        fraction: Any = ParallelModel.loss_fraction
        assert fraction.fget(parallel) == wanted
