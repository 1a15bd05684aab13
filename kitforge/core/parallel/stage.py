"""The stages of a stack on this rank: their passes, with what they receive and send."""

from collections import deque
from collections.abc import Mapping, Sequence
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

    stage: int
    stream: Tensor | None  # what came from the stage before
    output: Tensor
    sent: dist.Work | None  # on its way to the next stage


class Stages:
    """Those of a stack that this rank has. Nothing but the stream [B, T, dim] goes from stage to stage: tokens and
    contexts are those of the micro-batch, which every stage has."""

    def __init__(
        self,
        stack: Stack,
        mesh: Mesh,
        column: Column,
        dtype: torch.dtype,
        parts: Mapping[str, Sequence[int]],
        *,
        first: int | None,
    ) -> None:
        """`dtype` is that of the stream, in which the embedding begins it; `parts` are the stages of parameters that
        not all have; `first` is the first stage with a parameter that is trained so far, for a plan, which hears of no
        other rank."""
        self.stack = stack
        self.column = column
        self.own = column.pipeline.stages_of(column.index)
        self.last = column.pipeline.num_stages - 1
        self._degrees = mesh.degrees
        self._dtype = dtype
        self._parts = parts
        self._first_if_dry = first
        # On their way, with what is sent, which lives until then.
        self._returning: dict[int, deque[tuple[dist.Work, Tensor]]] = {stage: deque() for stage in self.own}

    @cached_property
    def first_trained(self) -> int | None:
        """The first stage with a parameter that is trained, before which no gradient goes; None without one. All ranks
        of the column ask for it together, the first time."""
        trained = [name for name, each in self.stack.named_parameters() if each.requires_grad]
        own = min((min(self._parts.get(name, (0,))) for name in trained), default=None)
        everyones = collectives.all_gather_object(own, self.column.group, self._first_if_dry)
        return min((each for each in everyones if each is not None), default=None)

    def has_backward(self, stage: int) -> bool:
        """Whether a backward pass reaches a stage."""
        return self.first_trained is not None and stage >= self.first_trained

    def layers(self, stage: int) -> range:
        """The layers of one of the stages of this rank."""
        assert self.stack.layers is not None
        return self.stack.layers[self.own.index(stage)]

    def forward(self, stage: int, input: Tensor, context: Context) -> Flight:
        """Receive the stream, pass it through the blocks, and start to send it on."""
        first, stream, sent = self.first_trained, None, None
        if stage > 0:
            stream = self.column.receive(self._shape(input, context), self._dtype, stage - 1, stage)
            stream.requires_grad_(torch.is_grad_enabled() and first is not None and stage > first)
        output = self.stack.stage_pass(input, context, stream, self.layers(stage))
        if stage < self.last:
            wanted = (self._shape(input, context), self._dtype)
            if (tuple(output.shape), output.dtype) != wanted:
                raise ModelError("a stage has another stream than the next one expects", got=output, expected=wanted)
            sent = self.column.start_send(output.detach().contiguous(), stage, stage + 1)
        return Flight(stage=stage, stream=stream, output=output, sent=sent)

    def backward(self, flight: Flight, gradient: Tensor | None = None) -> None:
        """Backpropagate the gradient of the output, by default the one that the next stage sends, and start to send
        that of the stream. Nothing but the end of a flight for a stage before all that is trained."""
        stage, output = flight.stage, flight.output
        if flight.sent is not None:
            flight.sent.wait()
        if not self.has_backward(stage):
            return
        if gradient is None and stage < self.last:
            gradient = self.column.receive(output.shape, output.dtype, stage + 1, stage)
        torch.autograd.backward(output, gradient)
        if flight.stream is not None and flight.stream.requires_grad:
            found = torch.zeros_like(flight.stream) if flight.stream.grad is None else flight.stream.grad
            # To wait for the last one would close a ring where stages are interleaved.
            if len(returning := self._returning[stage]) == 2:
                returning.popleft()[0].wait()
            sent = self.column.start_send(found := found.contiguous(), stage, stage - 1)
            returning.extend(() if sent is None else ((sent, found),))

    def finish(self) -> None:
        """Wait until all gradients have been received."""
        for returning in self._returning.values():
            while returning:
                returning.popleft()[0].wait()

    def from_last(self, output: Tensor, input: Tensor) -> Tensor:
        """The output of the last stage, for an input, on all of them."""
        length = input.shape[1] if self.stack.length is None else self.stack.length
        shape = input.shape[0], length, self.stack.dim
        return self.column.from_last(output if self.column.is_last else None, shape, self._dtype)

    def _shape(self, input: Tensor, context: Context) -> tuple[int, int, int]:
        """Of this rank's part of the stream of an input."""
        degrees, stack = self._degrees, self.stack
        length = input.shape[1] if stack.length is None else stack.length
        tensor = degrees.tensor if degrees.sequence_parallel else 1
        if stack.cut is not None and isinstance(context.attend, RowAttend) and input.numel():
            length = degrees.shard_length(length)
        return input.shape[0], length // tensor if length % tensor == 0 else length, stack.dim
