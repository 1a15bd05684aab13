"""The stage of a stack on this rank: its passes, with what they receive and send."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from kitforge.core.nn.context import Context, RowAttend
from kitforge.core.nn.stack import Stack
from kitforge.core.parallel import collectives
from kitforge.core.parallel.column import Column
from kitforge.core.parallel.mesh import Mesh
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A micro-batch between its forward and its backward pass through a stage."""

    stream: Tensor | None  # what came from the stage before
    output: Tensor
    sent: dist.Work | None  # on its way to the next stage


class Stage:
    """A stack of which this rank has some of the blocks. Nothing but the stream [B, T, dim] goes from stage to stage:
    tokens and contexts are those of the micro-batch, which every stage has."""

    def __init__(self, stack: Stack, mesh: Mesh, column: Column, dtype: torch.dtype) -> None:
        """`dtype` is that of the stream, in which the embedding begins it."""
        self.stack = stack
        self.column = column
        self._degrees = mesh.degrees
        self._dtype = dtype
        self._returning: dist.Work | None = None

    @cached_property
    def first_trained(self) -> int | None:
        """The first stage with a parameter that is trained, before which no gradient goes; None without one. All ranks
        of the column ask for it together, the first time."""
        is_trained = any(each.requires_grad for each in self.stack.parameters())
        stages = [
            stage for stage, each in enumerate(collectives.all_gather_object(is_trained, self.column.group)) if each
        ]
        return stages[0] if stages else None

    @property
    def has_backward(self) -> bool:
        """Whether a backward pass reaches this stage."""
        return self.first_trained is not None and self.column.stage >= self.first_trained

    def forward(self, input: Tensor, context: Context) -> Flight:
        """Receive the stream, pass it through the blocks, and start to send it on."""
        column, first, stream, sent = self.column, self.first_trained, None, None
        if not column.is_first:
            stream = column.receive(self._shape(input, context), self._dtype, column.stage - 1)
            stream.requires_grad_(torch.is_grad_enabled() and first is not None and column.stage > first)
        output = self.stack.stage_pass(input, context, stream)
        if not column.is_last:
            wanted = (self._shape(input, context), self._dtype)
            if (tuple(output.shape), output.dtype) != wanted:
                raise ModelError("a stage has another stream than the next one expects", got=output, expected=wanted)
            sent = column.start_send(output.detach().contiguous(), column.stage + 1)
        return Flight(stream=stream, output=output, sent=sent)

    def backward(self, flight: Flight, gradient: Tensor | None = None) -> None:
        """Backpropagate the gradient of the output, by default the one that the next stage sends, and start to send
        that of the stream. Nothing but the end of a flight for a stage before all that is trained."""
        column, output = self.column, flight.output
        if flight.sent is not None:
            flight.sent.wait()
        if not self.has_backward:
            return
        if gradient is None and not column.is_last:
            gradient = column.receive(output.shape, output.dtype, column.stage + 1)
        torch.autograd.backward(output, gradient)
        if flight.stream is not None and flight.stream.requires_grad:
            found = torch.zeros_like(flight.stream) if flight.stream.grad is None else flight.stream.grad
            self.finish()
            self._returning = column.start_send(found.contiguous(), column.stage - 1)

    def finish(self) -> None:
        """Wait until the last gradient has been received."""
        if self._returning is not None:
            self._returning.wait()
        self._returning = None

    def _shape(self, input: Tensor, context: Context) -> tuple[int, int, int]:
        """Of this rank's part of the stream of an input."""
        degrees, stack = self._degrees, self.stack
        length = input.shape[1] if stack.length is None else stack.length
        tensor = degrees.tensor if degrees.sequence_parallel else 1
        if stack.cut is not None and isinstance(context.attend, RowAttend) and input.numel():
            length = -(-length // (degrees.context * tensor)) * tensor
        return input.shape[0], length // tensor if length % tensor == 0 else length, stack.dim
