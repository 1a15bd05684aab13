"""The gradients of a step's lookups, kept until `step` moves the rows or forgets them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.workspace import Workspace
from kitforge.core.optim.grad_norm import global_norm
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotGradients:
    """Gradients [n, dim] of the rows at distinct slots [n] of the device tier."""

    slots: Tensor
    gradients: Tensor


@final
class RowGradients:
    """Gradients by slot, summed over the lookups of a step in the order of their backward passes."""

    def __init__(self, tier: DeviceTier, dim: int) -> None:
        self._tier, self._dim = tier, dim
        self._parts: list[SlotGradients] = []
        self._scratch = Workspace()
        # Of the lookups whose gradients are here: their rows must stay.
        self.handles: list[LookupHandle] = []
        # Whether the gradients are those of all ranks, where all ranks hold all rows.
        self.is_reduced = False

    def buffer(self, name: str, num_rows: int) -> Tensor:
        """Memory [num_rows, dim] of that name, kept from step to step, whose values are not set."""
        if self._tier.device.type == "cpu":
            return self._scratch.take(name, num_rows, self._dim)
        return torch.empty(num_rows, self._dim, device=self._tier.device)

    @property
    def next_buffer_name(self) -> str:
        """Of a buffer that no gradient which is kept lies in."""
        return f"part {len(self.handles)}"

    def add(self, handle: LookupHandle, gradients: Tensor) -> None:
        """Take over the gradients [u, dim] of the ticket's rows; those that do not train are left out."""
        slots = handle.slots
        if handle.is_trained is not None:
            slots, gradients = slots[handle.is_trained], gradients[self._tier.to_device(handle.is_trained)]
        self.handles.append(handle)
        self._parts.append(SlotGradients(slots=slots, gradients=gradients))

    def merged(self) -> SlotGradients | None:
        """All gradients, each row once; None when there are none. They may be written to."""
        if len(self._parts) > 1:
            tier, parts = self._tier, self._parts
            slots, inverse = tier.kernels.unique(torch.cat([part.slots for part in parts]))
            gradients = torch.cat(
                [part.gradients for part in parts], out=self.buffer("joined", sum(len(part.slots) for part in parts))
            )
            summed = tier.kernels.embedding_bag_backward(
                gradients, tier.to_device(inverse), len(slots), out=self.buffer("summed", len(slots))
            )
            self._parts = [SlotGradients(slots=slots, gradients=summed)]
        return self._parts[0] if self._parts else None

    def set_reduced(self, handle: LookupHandle, part: SlotGradients) -> None:
        """Let `part` be all gradients there are, with a ticket for rows that were not needed here before."""
        self._parts, self.is_reduced = [part], True
        self.handles.append(handle)

    def squared_norm(self) -> Tensor:
        """The sum of squares over all rows, 0-dim float64."""
        part = self.merged()
        return torch.zeros((), dtype=torch.float64) if part is None else global_norm([part.gradients]).double() ** 2

    def scale_(self, factor: float) -> None:
        """Multiply all gradients."""
        for part in self._parts:
            part.gradients.mul_(factor)

    def clear(self) -> None:
        """Let go of all gradients."""
        self._parts, self.handles, self.is_reduced = [], [], False


@final
class GradientHandle:
    """Takes the gradients of one lookup. When nobody can bring them any more, the lookup is done."""

    def __init__(self, handle: LookupHandle, gradients: RowGradients, pins: PinRegistry) -> None:
        self._lookup, self._gradients, self._pins = handle, gradients, pins
        self._finalizer = weakref.finalize(self, pins.close, handle.number)
        self._finalizer.atexit = False

    def buffer(self) -> Tensor:
        """Memory for the gradients [u, dim]."""
        return self._gradients.buffer(self._gradients.next_buffer_name, len(self._lookup.slots))

    def __call__(self, gradients: Tensor) -> None:
        """Keep the gradients [u, dim] until the step. Raises ModelError when that has been."""
        if not self._lookup.is_open:
            raise ModelError(
                "a backward pass came after the step of its lookup",
                fix="call backward once for each lookup, before step or clear_gradients",
            )
        self._finalizer.detach()
        self._gradients.add(self._lookup, gradients)

    def close(self) -> None:
        """There will be no gradients."""
        self._finalizer()
