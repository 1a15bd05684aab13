"""Any loss over stages: `hidden` and the head of a stack as they are on one rank, its stages one after another.

`hidden` is one node of autograd. Its forward pass runs through the stages, and all of them get the output of the last
one, so a loss of any kind is computed by every rank alike, as are samples and evaluations. The head has its matrix on
the last stage, which computes logits, losses and log-probabilities for all. A backward pass begins on each of p stages
with 1/p of the loss (`ParallelModel.loss_fraction`): the gradients of an output are summed over the stages, which makes
it the whole one, and go back through them. So are those of parameters that all stages have, such as a head of scores.

Stages take turns, so a pass takes the time of one rank with all blocks: a step that can should be pipelined instead.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.nn.context import Context
from kitforge.core.parallel import collectives
from kitforge.core.parallel.column import Column
from kitforge.core.parallel.stage import Stages

Compute = Callable[[Tensor], tuple[Tensor, ...]]


class Relay:
    """Stands in for `hidden`, `head` and the kernels of the head of a stack."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.is_scheduled = False  # while a schedule runs the stages, and the last one alone computes the loss
        stack: Any = stages.stack
        # Set past nn.Module's own bookkeeping, which takes attributes for modules and parameters.
        stack.__dict__["hidden"] = self.hidden
        self._kernels = stack.kernels
        stack.kernels = dataclasses.replace(
            stack.kernels, linear_cross_entropy=self._cross_entropy, linear_log_probs=self._log_probs
        )
        if hasattr(stack, "head"):
            self._head = stack.head
            stack.__dict__["head"] = self._logits

    def hidden(self, input: Tensor, context: Context | None = None) -> Tensor:
        """See `Stack.hidden`."""
        is_trained = self.stages.first_trained is not None
        node: Any = _Passes.apply
        output: Tensor = node(self._anchor(is_trained), self.stages, input, context or Context())
        return output

    def _logits(self, hidden: Tensor) -> Tensor:
        stack: Any = self.stages.stack
        shape = *hidden.shape[:-1], stack.geometry.vocab_size
        return self._on_last(hidden, [shape], lambda own: (self._head(own),))[0]

    def _cross_entropy(self, hidden: Tensor, *operands: Any, **options: Any) -> Tensor:
        loss = self._kernels.linear_cross_entropy
        return self._on_last(hidden, [()], lambda own: (loss(own, *operands, **options),))[0]

    def _log_probs(self, hidden: Tensor, *operands: Any, **options: Any) -> tuple[Tensor, ...]:
        log_probs = self._kernels.linear_log_probs
        return self._on_last(hidden, [hidden.shape[:-1]] * 2, lambda own: log_probs(own, *operands, **options))

    def _on_last(self, hidden: Tensor, shapes: Sequence[Sequence[int]], compute: Compute) -> tuple[Tensor, ...]:
        """The tensors of these shapes that the last stage computes of hidden states, on all of them."""
        if self.is_scheduled:
            return compute(hidden)
        is_trained = hidden.requires_grad or self.stages.first_trained is not None
        node: Any = _OnLast.apply
        found: tuple[Tensor, ...] = node(self._anchor(is_trained), self.stages.column, hidden, shapes, compute)
        return found

    def _anchor(self, is_trained: bool) -> Tensor:
        """An input that asks for a gradient, as the parameters of a stage are not among the inputs of a node."""
        device = self.stages.column.device
        return torch.zeros((), device=device, requires_grad=is_trained and torch.is_grad_enabled())


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, stages: Stages, input: Tensor, context: Context) -> Tensor:
        with torch.set_grad_enabled(anchor.requires_grad):
            flights = [stages.forward(stage, input, context) for stage in stages.own]
        ctx.stages, ctx.flights = stages, flights
        whole = stages.from_last(flights[-1].output, input)
        for flight in flights:
            if flight.sent is not None and not anchor.requires_grad:
                flight.sent.wait()
        return whole

    @staticmethod
    @by_hand()
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        stages: Stages = ctx.stages
        whole = collectives.all_reduce_(gradient.clone(memory_format=torch.contiguous_format), stages.column.group)
        for flight in reversed(ctx.flights):
            stages.backward(flight, whole if flight.stage == stages.last else None)
        stages.finish()
        return None, None, None, None


class _OnLast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, column: Column, hidden: Tensor, shapes: Sequence[Sequence[int]], compute: Compute
    ) -> tuple[Tensor, ...]:
        ctx.column, ctx.own, ctx.outputs = column, hidden.detach(), (None,) * len(shapes)
        if column.is_last:
            with torch.set_grad_enabled(anchor.requires_grad):
                ctx.outputs = compute(ctx.own.requires_grad_(anchor.requires_grad))
        return tuple(column.from_last(*each, torch.float32) for each in zip(ctx.outputs, shapes, strict=True))

    @staticmethod
    @by_hand()
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        column: Column = ctx.column
        wholes = [collectives.all_reduce_(each.clone(), column.group) for each in gradients]
        own: Tensor = ctx.own
        if column.is_last:
            torch.autograd.backward(ctx.outputs, wholes)
        # The sum over the stages, by the node of `hidden`, is that of the last one.
        return None, None, torch.zeros_like(own) if own.grad is None else own.grad, None, None
