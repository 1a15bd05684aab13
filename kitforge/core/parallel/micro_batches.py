"""The micro-batches of a training step: a forward and a backward pass of each, and the sums of their losses."""

from abc import ABC
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.parallel import collectives
from kitforge.core.parallel.expert_load import LOAD, check_balance, load_of
from kitforge.core.parallel.parallelize import ParallelModel
from kitforge.core.parallel.schedules import one_f_one_b
from kitforge.core.parallel.stage import Flight
from kitforge.foundation.errors import TrainingError
from kitforge.foundation.log import logger, warn_once
from kitforge.foundation.types import MicroBatch, Sums

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


def composed_loss(task: Losses, model: nn.Module, micro_batch: MicroBatch, weight: float | None = None) -> Sums:
    """`loss_of` the hidden states of `inputs`; layers see the weight of the loss in their context."""
    hidden = cast(CausalLM, model).hidden(*_given(task, model, micro_batch, weight))
    return task.loss_of(model, hidden, micro_batch)


def _given(task: Losses, model: nn.Module, micro_batch: MicroBatch, weight: float | None) -> tuple[Tensor, Context]:
    tokens, context = task.inputs(micro_batch)
    dropout_key = context.dropout if model.training else None
    factor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    return tokens, replace(context, dropout=dropout_key, loss_weight=factor)


def run_micro_batches(
    parallel: ParallelModel,
    task: Losses,
    step: Sequence[MicroBatch],
    weight: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Sums:
    """Gradients of loss * weight, summed over the micro-batches and the ranks; returns this rank's sums by name."""
    totals, mesh, composes = Sums(), parallel.mesh, is_composed(task)
    check_balance(parallel.experts.values(), len(step), 1 if mesh is None else mesh.num_replicas)
    run = _run_in_order if composes and parallel.model in parallel.relays else _run_one_by_one
    for sums in run(parallel, task, step, weight, autocast):
        for name, value in sums.items():
            totals[name] = totals[name] + value.detach() if name in totals else value.detach()
    parallel.reduce_gradients()
    if mesh is not None and LOAD in totals:
        collectives.all_reduce_(totals[LOAD], mesh.group("pipeline"))  # each stage has its own layers
    return totals


def _run_one_by_one(
    parallel: ParallelModel,
    task: Losses,
    step: Sequence[MicroBatch],
    weight: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Sums]:
    """A forward and a backward pass of each micro-batch; those of one stage after those of another."""
    model, composes, own_weight = parallel.model, is_composed(task), weight * parallel.loss_fraction
    if parallel.takes_turns:
        warn_once(_log, "parallel.pipeline: this task computes its loss on all stages, which take turns in each step")
    for number, micro_batch in enumerate(step, start=1):
        parallel.micro_batch(is_last=number == len(step))
        with autocast():
            sums = composed_loss(task, model, micro_batch, weight) if composes else task.loss(model, micro_batch)
        torch.autograd.backward(sums["loss"] * own_weight)
        yield {**sums, **load_of(parallel, composes)}


def _run_in_order(
    parallel: ParallelModel,
    task: Losses,
    step: Sequence[MicroBatch],
    weight: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[Sums]:
    """The passes of this stage in the order 1F1B. What the last stage has summed is sent to all at the end."""
    model, stage = parallel.model, parallel.relays[parallel.model].stage
    order = one_f_one_b(stage.column.stage, stage.column.num_stages, len(step))
    flights: dict[int, Flight] = {}
    found: list[Sums] = []
    # Weights that are gathered for the first forward pass stay for the others.
    parallel.micro_batch(is_last=False)
    with parallel.scheduled():
        for number, (kind, each) in enumerate(order, start=1):
            if kind == "F":
                with autocast():
                    flight = stage.forward(*_given(task, model, step[each], weight))
                    if stage.column.is_last:
                        sums = task.loss_of(model, flight.output, step[each])
                        flight = replace(flight, output=sums["loss"] * (weight * parallel.loss_fraction))
                        found.append({name: value.detach().cpu() for name, value in sums.items()})
                flights[each] = flight
                # Now, since a recomputation in the backward pass of an earlier micro-batch writes another load.
                yield load_of(parallel, is_composed=True)
            else:
                parallel.micro_batch(is_last=number == len(order))
                stage.backward(flights.pop(each))
        stage.finish()
    for sums in collectives.broadcast_object(found, stage.column.group, stage.column.num_stages - 1):
        yield {name: value.to(parallel.device) for name, value in sums.items()}
