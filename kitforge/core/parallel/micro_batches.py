"""The micro-batches of a training step: a forward and a backward pass of each, and the sums of their losses."""

from abc import ABC
from collections.abc import Callable, Sequence
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
from kitforge.foundation.errors import TrainingError
from kitforge.foundation.types import MicroBatch, Sums


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
    tokens, context = task.inputs(micro_batch)
    dropout_key = context.dropout if model.training else None
    factor = None if weight is None else torch.tensor(weight, dtype=torch.float64)
    hidden = cast(CausalLM, model).hidden(tokens, replace(context, dropout=dropout_key, loss_weight=factor))
    return task.loss_of(model, hidden, micro_batch)


def run_micro_batches(
    parallel: ParallelModel,
    task: Losses,
    step: Sequence[MicroBatch],
    weight: float,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Sums:
    """Gradients of loss * weight, summed over the micro-batches and the ranks; returns this rank's sums by name."""
    totals, model = Sums(), parallel.model
    composes = is_composed(task)
    mesh, own_weight = parallel.mesh, weight * parallel.loss_fraction
    check_balance(model, len(step), 1 if mesh is None else mesh.num_replicas)
    for number, micro_batch in enumerate(step, start=1):
        parallel.micro_batch(is_last=number == len(step))
        with autocast():
            sums = composed_loss(task, model, micro_batch, weight) if composes else task.loss(model, micro_batch)
        torch.autograd.backward(sums["loss"] * own_weight)
        for name, value in {**sums, **load_of(parallel, composes)}.items():
            totals[name] = totals[name] + value.detach() if name in totals else value.detach()
    parallel.reduce_gradients()
    if mesh is not None and LOAD in totals:
        collectives.all_reduce_(totals[LOAD], mesh.group("pipeline"))  # each stage has its own layers
    return totals
