"""The micro-batches of a training step: a forward and a backward pass of each, and the sums of their losses."""

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.parallel import collectives
from kitforge.core.parallel.expert_load import LOAD, check_balance, load_of
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.schedules import Pass, idle_fraction, in_pairs
from kitforge.core.parallel.stage import Flight
from kitforge.core.parallel.turns import Turns
from kitforge.foundation.errors import TrainingError
from kitforge.foundation.log import logger, warn_once
from kitforge.foundation.types import MicroBatch, Sums

# By mixture of experts what its pass has written, see `MoE.load`.
Loads = dict[nn.Module, Tensor]
Autocast = Callable[[], AbstractContextManager[Any]]
# Bytes of a message below which the turns of two slices take longer than they hide: benchmarks/parallel/copies.md.
SLICE_BYTES = 2**16
_log = logger(__name__)


class Losses(ABC):  # noqa: B024 (a task gives one method or two)
    """The losses of micro-batches: `loss`, or `inputs` and `loss_of`, so that the network between these two may be on
    other ranks."""

    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Context]:
        """The tokens and the context for `hidden` of the network; in evaluation its dropout is left out."""
        raise TrainingError(f"{type(self).__name__} gives no loss", fix="define loss, or inputs and loss_of")

    def loss_of(self, model: nn.Module, hidden: Tensor, micro_batch: MicroBatch) -> Sums:
        """`loss` of the hidden states of `inputs`."""
        raise TrainingError(f"{type(self).__name__} gives no loss of hidden states", fix="define loss_of, or loss")

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """Sums over the micro-batch: "loss", which is differentiated, and further metrics by name. Default: `loss_of`
        the hidden states of `inputs`."""
        return composed_loss(self, model, micro_batch)


def is_composed(task: Losses) -> bool:
    """Whether the task has `inputs` and `loss_of`, and no `loss` of its own."""
    return getattr(task.loss, "__func__", None) is Losses.loss


def composed_loss(
    task: Losses, model: nn.Module, micro_batch: MicroBatch, weight: float | None = None, loads: Loads | None = None
) -> Sums:
    """`loss_of` the hidden states of `inputs`; layers see the weight of the loss in their context, and `loads`."""
    hidden = cast(CausalLM, model).hidden(*_given(task, model, micro_batch, weight, loads))
    return task.loss_of(model, hidden, micro_batch)


def _given(
    task: Losses, model: nn.Module, micro_batch: MicroBatch, weight: float | None, loads: Loads | None = None
) -> tuple[Tensor, Context]:
    tokens, context = task.inputs(micro_batch)
    dropout_key = context.dropout if model.training else None
    factor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    return tokens, replace(context, dropout=dropout_key, loss_weight=factor, loads=loads)


def run_micro_batches(
    parallel: ParallelModel, task: Losses, step: Sequence[MicroBatch], weight: float, autocast: Autocast
) -> Sums:
    """Gradients of loss * weight, summed over the micro-batches and the ranks; returns this rank's sums by name."""
    totals, mesh, composes = Sums(), parallel.mesh, is_composed(task)
    check_balance(parallel.experts.values(), len(step), 1 if mesh is None else mesh.num_replicas)
    is_scheduled = composes and parallel.model in parallel.relays
    in_slices = parallel.slices_pay is not False and mesh is not None and mesh.degrees.slices > 1
    run = _run_in_order if is_scheduled else _run_in_slices if in_slices else _run_one_by_one
    for sums in run(parallel, task, step, weight, autocast):
        for name, value in sums.items():
            totals[name] = totals[name] + value.detach() if name in totals else value.detach()
    parallel.reduce_gradients()
    if mesh is not None and LOAD in totals:
        collectives.all_reduce_(totals[LOAD], mesh.group("pipeline"))  # each stage has its own layers
    return totals


def _run_one_by_one(
    parallel: ParallelModel, task: Losses, step: Sequence[MicroBatch], weight: float, autocast: Autocast
) -> Iterator[Sums]:
    """A forward and a backward pass of each micro-batch; those of one stage after those of another."""
    if parallel.takes_turns:
        turns = "parallel.pipeline: this task computes its loss on all stages, which take turns in each step"
        warn_once(_log, f"{turns}; parallel.schedule is of tasks with inputs and loss_of")
    slices = 1 if parallel.mesh is None else parallel.mesh.degrees.slices
    for number, micro_batch in enumerate(step, start=1):
        is_last = number == len(step)
        # ZeRO 2 sums the slices of a micro-batch before ranks do, as in turns.
        parallel.micro_batch(is_last=is_last, reduces=is_last or number % slices == 0)
        yield _run_one(parallel, task, micro_batch, weight, autocast)


def _run_one(
    parallel: ParallelModel,
    task: Losses,
    micro_batch: MicroBatch,
    weight: float,
    autocast: Autocast,
    loads: Loads | None = None,
) -> Sums:
    model, composes = parallel.model, is_composed(task)
    with autocast():
        sums = composed_loss(task, model, micro_batch, weight, loads) if composes else task.loss(model, micro_batch)
    torch.autograd.backward(sums["loss"] * (weight * parallel.loss_fraction))
    return {**sums, **load_of(parallel, composes, loads=loads)}


def _run_in_slices(
    parallel: ParallelModel, task: Losses, step: Sequence[MicroBatch], weight: float, autocast: Autocast
) -> Iterator[Sums]:
    """Each two micro-batches as two threads that take turns; the first step says whether the next ones do."""
    num_bytes = 0
    for start in range(0, len(step), 2):
        pair, is_last = step[start : start + 2], start + 2 >= len(step)
        if len(pair) == 1:
            parallel.micro_batch(is_last=is_last)
            yield _run_one(parallel, task, pair[0], weight, autocast)
            continue
        one, other = (partial(_run_one, parallel, task, each, weight, autocast, {}) for each in pair)
        turns = _turns_of(parallel)
        with parallel.slices(is_last=is_last):
            sums = turns.run((one, other), parallel.device)
        yield from sums
        num_bytes = max(num_bytes, turns.num_bytes)
    if parallel.slices_pay is None and len(step) > 1:
        _choose_turns(parallel, num_bytes)


def _turns_of(parallel: ParallelModel) -> Turns:
    assert parallel.mesh is not None
    return Turns(free=(parallel.mesh.group("tensor"), parallel.mesh.group("context")))


def _choose_turns(parallel: ParallelModel, num_bytes: int) -> None:
    """Choose by the bytes of this rank's largest message whether passes take turns from the next step on."""
    assert parallel.mesh is not None
    # The same on all ranks, whose messages differ with their rows.
    largest = torch.tensor(num_bytes, device=parallel.device)
    num_bytes = int(collectives.all_reduce_(largest, parallel.mesh.world, collectives.MAX))
    parallel.slices_pay = num_bytes >= SLICE_BYTES
    if parallel.rank > 0:
        return
    way = "take turns" if parallel.slices_pay else "run one after another: turns would take longer than they hide"
    text = "parallel.copies=2: the largest message has %s bytes; from %s on %s pay, and here they %s"
    what = "slices" if parallel.mesh.degrees.slices > 1 else "pairs of passes"
    _log.warning(text, f"{num_bytes:,}", f"{SLICE_BYTES:,}", what, way)


def _run_in_order(
    parallel: ParallelModel, task: Losses, step: Sequence[MicroBatch], weight: float, autocast: Autocast
) -> Iterator[Sums]:
    """The passes of the stages of this rank in the order of the schedule, with copies=2 in pairs that take turns. What
    the last stage has summed is sent to all at the end."""
    stages, num_bytes = parallel.relays[parallel.model].stages, 0
    column = stages.column
    order = column.pipeline.passes(column.index, len(step))
    if len(step) < column.pipeline.num_stages:
        few = f"a step has fewer micro-batches ({len(step)}) than stages ({column.pipeline.num_stages})"
        idle = f"a rank waits {idle_fraction(column.pipeline, len(step)):.0%} of it"
        warn_once(_log, f"parallel.pipeline: {few}, so that {idle}; lower trainer.micro_batch_size")
    own = _StagePasses(parallel, task, step, weight, autocast)
    own.last = [each for each in order if each.kind == "B" and stages.has_backward(each.stage)][-1:]
    # Weights that are gathered for the first forward pass stay for the others.
    parallel.micro_batch(is_last=False)
    with parallel.scheduled():
        for passes, other in in_pairs(order, are_apart=parallel.slices_pay is False):
            loads = None if other is None else Loads()
            if other is None:
                own.run(passes)
            else:
                turns = _turns_of(parallel)
                turns.run((partial(own.run, passes), partial(own.run, [other], loads)), parallel.device)
                num_bytes = max(num_bytes, turns.num_bytes)
            for each in (each for each in (*passes, other) if each is not None and each.kind == "F"):
                # Now, since a recomputation in the backward pass of an earlier micro-batch writes another load.
                yield load_of(parallel, is_composed=True, layers=stages.layers(each.stage), loads=loads)
        stages.finish()
    if parallel.slices_pay is None and len(step) > 1:
        _choose_turns(parallel, num_bytes)
    for sums in collectives.broadcast_object(own.found, column.group, column.last):
        yield {name: value.to(parallel.device) for name, value in sums.items()}


class _StagePasses:
    """The passes of a step through the stages of this rank, and what the last stage has summed."""

    def __init__(
        self, parallel: ParallelModel, task: Losses, step: Sequence[MicroBatch], weight: float, autocast: Autocast
    ) -> None:
        self.found: list[Sums] = []
        self.last: list[Pass] = []  # the backward pass behind which no other comes, if there is any
        self._parallel, self._task, self._step, self._weight, self._autocast = parallel, task, step, weight, autocast
        self._flights: dict[tuple[int, int], Flight] = {}
        self._stages = parallel.relays[parallel.model].stages

    def run(self, passes: Sequence[Pass], loads: Loads | None = None) -> None:
        """One after another."""
        queue = self._parallel.weight_gradients
        for one in passes:
            key = (one.stage, one.micro_batch)
            if one.kind == "F":
                self._flights[key] = self._forward(*key, loads)
            elif one.kind == "W":
                assert queue is not None
                queue.run(*key)
            else:
                self._parallel.micro_batch(is_last=one in self.last)
                if queue is not None:
                    queue.key = key
                self._stages.backward(self._flights.pop(key))

    def _forward(self, stage: int, number: int, loads: Loads | None) -> Flight:
        stages, micro_batch, model = self._stages, self._step[number], self._parallel.model
        with self._autocast():
            flight = stages.forward(stage, *_given(self._task, model, micro_batch, self._weight, loads))
            if stage < stages.last:
                return flight
            sums = self._task.loss_of(model, flight.output, micro_batch)
            self.found.append({name: value.detach().cpu() for name, value in sums.items()})
            return replace(flight, output=sums["loss"] * (self._weight * self._parallel.loss_fraction))
