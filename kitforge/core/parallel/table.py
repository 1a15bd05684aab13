"""Row-wise sharded embedding tables: every row is on one rank, by a hash of its id.

A lookup sends ids to their owners and receives vectors; its backward pass sends gradients. No row changes before
`step`. This file knows ids, vectors and gradients only; the owner's lookup is passed in.

Legend: N ids looked up here, u distinct ones among them, r ids that all ranks ask of this one, m distinct ones among
those, dim the width of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.dispatch import select_table
from kitforge.core.parallel import collectives
from kitforge.foundation.errors import DataError, ModelError

# The constants of SplitMix64 as the signed numbers that torch has.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
SECOND_FACTOR = 0x94D049BB133111EB - 2**64


def splitmix64(numbers: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea and Flood, 2014) of every int64: its first output when it is seeded by that number."""
    mixed = numbers + GAMMA
    mixed = (mixed ^ logical_shift_right(mixed, 30)) * FIRST_FACTOR
    mixed = (mixed ^ logical_shift_right(mixed, 27)) * SECOND_FACTOR
    return mixed ^ logical_shift_right(mixed, 31)


def logical_shift_right(numbers: Tensor, num_bits: int) -> Tensor:
    """The bits moved to the right, zeros following: torch's own shift repeats the sign."""
    return (numbers >> num_bits) & ((1 << (64 - num_bits)) - 1)


def owner(ids: Tensor, num_ranks: int) -> Tensor:
    """The owner rank of each id, the same in every run."""
    return logical_shift_right(splitmix64(ids), 1) % num_ranks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExchangePlan:
    """The routing of one lookup: owners of its ids, and requested ids of this owner. It has no vectors.

    It is valid for any number of fetches, before and after steps.
    """

    inverse: Tensor  # [N] the place of each id among the u, which stand in the order of their owners
    sent: tuple[int, ...]  # how many of the u each rank owns
    received: tuple[int, ...]  # how many of the r each rank asks for
    ids: Tensor  # [m] in the order in which they are first asked for
    positions: Tensor | None  # [r] the place of each asked id among the m, in rank order; None: the m are what is asked


class GradientReceiver(Protocol):
    """Receives the gradients of the rows of this rank."""

    def add(self, ids: Tensor, gradients: Tensor) -> None:
        """Add the gradients [m, dim] of distinct ids [m]."""


# The owner's lookup: distinct ids [m] to their rows [m, dim].
RowsOf = Callable[[Tensor], Tensor]
# The rank on which the row of each of these ids [n] lives, among so many.
OwnerOf = Callable[[Tensor, int], Tensor]


class EmbeddingExchange:
    """The exchange of ids, vectors and gradients within a group of ranks that all own rows.

    All ranks make the same lookups in the same order, with no ids where they have none, and run the backward pass
    through each. The gradients of all ranks add up, so ranks that share a sample must not each bring the whole of its
    gradient.
    """

    def __init__(self, group: collectives.Group, owner_of: OwnerOf = owner) -> None:
        self._group, self._owner_of = group, owner_of

    def plan(self, ids: Tensor) -> ExchangePlan:
        """Tell the owners of `ids` [N] that these will be asked for. It reads no row, so it may run steps ahead.

        Beside other communication it needs a group of its own: a route may come from the axis of another group of the
        same ranks. Raises DataError for ids that are not a vector of int64.
        """
        if ids.dtype != torch.int64 or ids.dim() != 1:
            got = f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}"
            raise DataError("these cannot be ids of rows", got=got, expected="int64 [num_ids]")
        unique, inverse = select_table(ids.device.type).unique(ids)
        if self._group is None:
            return ExchangePlan(
                inverse=inverse, sent=(len(unique),), received=(len(unique),), ids=unique, positions=None
            )
        num_ranks = collectives.group_size(self._group)
        owners = self._owner_of(unique, num_ranks)
        order = torch.argsort(owners, stable=True)
        counts, ones = torch.bincount(owners, minlength=num_ranks), [1] * num_ranks
        sent, received = counts.tolist(), collectives.all_to_all(counts, ones, ones, self._group).tolist()
        asked = collectives.all_to_all(unique[order], received, sent, self._group)
        # Several ranks may ask for one row, so what comes from distinct ids need not be distinct.
        own, positions = select_table(asked.device.type).unique(asked)
        return ExchangePlan(
            inverse=torch.argsort(order)[inverse],
            sent=tuple(sent),
            received=tuple(received),
            ids=own,
            positions=positions,
        )

    def fetch(self, route: ExchangePlan, rows_of: RowsOf, sink: GradientReceiver) -> Tensor:
        """The rows [N, dim] along a route, as they are now.

        backward: every rank sums what it has for each row, the owner sums that over the ranks in rank order, and
        `sink` gets it. No row moves.
        """
        # Autograd calls the backward pass only of what depends on a tensor that asks for a gradient.
        anchor = torch.empty(0, requires_grad=True)
        vectors: Tensor = _FetchRows.apply(anchor, self._group, route, rows_of, sink)  # type: ignore[no-untyped-call]
        return vectors


class _FetchRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        _anchor: Tensor,
        group: collectives.Group,
        route: ExchangePlan,
        rows_of: RowsOf,
        sink: GradientReceiver,
    ) -> Tensor:
        ctx.group, ctx.route, ctx.sink = group, route, sink
        rows = rows_of(route.ids)
        if len(rows) != len(route.ids):
            raise ModelError("a table did not give one row for each id", got=len(rows), expected=len(route.ids))
        answers = rows if route.positions is None else rows.index_select(0, route.positions)
        return collectives.all_to_all(answers, route.sent, route.received, group).index_select(0, route.inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        route: ExchangePlan = ctx.route
        summed = _segment_sum(grad, route.inverse, sum(route.sent))
        summed = collectives.all_to_all(summed, route.received, route.sent, ctx.group)
        if route.positions is not None:
            summed = _segment_sum(summed, route.positions, len(route.ids))
        ctx.sink.add(route.ids, summed)
        return None, None, None, None, None


def _segment_sum(parts: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """[num_rows, dim] where each row of `parts` is added at its place, one after the other in the order they have."""
    return select_table(parts.device.type).embedding_bag_backward(parts, positions, num_rows)
