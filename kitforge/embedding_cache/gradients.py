"""The gradients of a step's lookups, kept until `step` moves the rows or forgets them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.scratch import Scratch
from kitforge.core.optim.norm import global_norm
from kitforge.embedding_cache.tickets import Register, Ticket
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Gradients [n, dim] of the rows at distinct slots [n] of the device tier."""

    slots: Tensor
    gradients: Tensor


@final
class RowGradients:
    """Gradients by slot, summed over the lookups of a step in the order of their backward passes."""

    def __init__(self, tier: DeviceTier, dim: int) -> None:
        self._tier, self._dim = tier, dim
        self._parts: list[Part] = []
        self._scratch = Scratch()
        # Of the lookups whose gradients are here: their rows must stay.
        self.tickets: list[Ticket] = []
        # Whether the gradients are those of all ranks, where all ranks hold all rows.
        self.is_total = False

    def buffer(self, name: str, num_rows: int) -> Tensor:
        """Memory [num_rows, dim] of that name, kept from step to step, whose values are not set."""
        if self._tier.device.type == "cpu":
            return self._scratch.take(name, num_rows, self._dim)
        return torch.empty(num_rows, self._dim, device=self._tier.device)

    @property
    def next_name(self) -> str:
        """Of a buffer that no gradient which is kept lies in."""
        return f"part {len(self.tickets)}"

    def add(self, ticket: Ticket, gradients: Tensor) -> None:
        """Take over the gradients [u, dim] of the ticket's rows; those that do not train are left out."""
        slots = ticket.slots
        if ticket.trains is not None:
            slots, gradients = slots[ticket.trains], gradients[self._tier.there(ticket.trains)]
        self.tickets.append(ticket)
        self._parts.append(Part(slots=slots, gradients=gradients))

    def merged(self) -> Part | None:
        """All gradients, each row once; None when there are none. They may be written to."""
        if len(self._parts) > 1:
            tier, parts = self._tier, self._parts
            slots, inverse = tier.kernels.unique(torch.cat([part.slots for part in parts]))
            gradients = torch.cat(
                [part.gradients for part in parts], out=self.buffer("joined", sum(len(part.slots) for part in parts))
            )
            summed = tier.kernels.segment_sum(
                gradients, tier.there(inverse), len(slots), out=self.buffer("summed", len(slots))
            )
            self._parts = [Part(slots=slots, gradients=summed)]
        return self._parts[0] if self._parts else None

    def set_total(self, ticket: Ticket, part: Part) -> None:
        """Let `part` be all gradients there are, with a ticket for rows that were not needed here before."""
        self._parts, self.is_total = [part], True
        self.tickets.append(ticket)

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
        self._parts, self.tickets, self.is_total = [], [], False


@final
class Delivery:
    """Takes the gradients of one lookup. When nobody can bring them any more, the lookup is done."""

    def __init__(self, ticket: Ticket, gradients: RowGradients, register: Register) -> None:
        self._ticket, self._gradients, self._register = ticket, gradients, register
        self._finalizer = weakref.finalize(self, register.close, ticket.number)
        self._finalizer.atexit = False

    def buffer(self) -> Tensor:
        """Memory for the gradients [u, dim]."""
        return self._gradients.buffer(self._gradients.next_name, len(self._ticket.slots))

    def __call__(self, gradients: Tensor) -> None:
        """Keep the gradients [u, dim] until the step. Raises ModelError when that has been."""
        if not self._ticket.is_open:
            raise ModelError(
                "a backward pass came after the step of its lookup",
                fix="call backward once for each lookup, before step or clear_gradients",
            )
        self._finalizer.detach()
        self._gradients.add(self._ticket, gradients)

    def close(self) -> None:
        """There will be no gradients."""
        self._finalizer()
