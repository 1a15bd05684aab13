"""How the rows of one table are spread over ranks: the kinds of `TablePlacement`, each a way to exchange.

Legend: u distinct ids asked for on this rank, m distinct rows that this rank must have for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import EmbeddingExchange, ExchangePlan, owner
from kitforge.foundation.config import check

# The rows [m, dim] of this rank as they are now, and what takes their gradients [m, dim].
FetchRows = Callable[[], Tensor]
Deliver = Callable[[Tensor], None]


class TableSharding(ABC):
    """Which rows of a table are on this rank, and how vectors and gradients find their way.

    All ranks call `route` and `vectors` alike, in the same order. Routes hold no values, so that `route` may run ahead,
    on a group of its own.
    """

    # The columns of a row that are here; None: all.
    columns: slice | None = None
    # Which share of all ids is here, and of how many.
    shard: tuple[int, int] = (0, 1)

    # Whether a snapshot has the rows from this rank; else another rank has the same.
    saves_rows: bool = True
    # This rank's number among those that have the table.
    rank: int = 0
    # Whether all ranks hold all rows, so that gradients have to be added up by `total`.
    is_replicated: bool = False
    # Whether the squares of this rank's gradients are its share of the norm; else another rank has the same rows.
    counts_for_norm: bool = True

    @property
    def owned_shard(self) -> tuple[int, int] | None:
        """`share`, or None where no ids at all live here."""
        return self.shard

    @abstractmethod
    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan | None:
        """Where distinct `keys` [u] live; None: here. `ahead`: by the group kept for a thread that runs ahead."""

    def all_gather_keys(self, keys: Tensor, ahead: bool) -> Tensor:
        """The distinct keys of all ranks, ascending. It is asked for where all ranks hold all rows and have to count
        alike; `ahead` as in `route`."""
        return keys

    @abstractmethod
    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """[u, dim], differentiable: `deliver` gets the sum over the ranks, in rank order."""

    def all_reduce_gradients(self, keys: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct keys and gradients of all ranks together. It is asked for where all ranks hold all rows."""
        return keys, gradients


@final
class RowWise(TableSharding):
    """Each row on one rank: by a hash of its id, or all of them on the rank `only`."""

    def __init__(self, group: Group, prefetch_group: Group, table_owner: int | None = None) -> None:
        def owner_of(ids: Tensor, num_ranks: int) -> Tensor:
            return owner(ids, num_ranks) if table_owner is None else torch.full_like(ids, table_owner)

        self._now, self._ahead = EmbeddingExchange(group, owner_of), EmbeddingExchange(prefetch_group, owner_of)
        self.rank, self._table_owner = collectives.group_rank(group), table_owner
        if table_owner is None:
            self.shard = (self.rank, collectives.group_size(group))

    @property
    def owned_shard(self) -> tuple[int, int] | None:
        """See `TableSharding`."""
        return self.shard if self._table_owner in (None, self.rank) else None

    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan:
        """See `TableSharding`."""
        return (self._ahead if ahead else self._now).plan(keys)

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """See `TableSharding`."""
        return self._now.fetch(route, lambda _: rows(), _GradientForwarder(deliver))


@final
class _GradientForwarder:
    """A `GradientAccumulator` that hands on what it gets; the ids are known to whoever made the route."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def add(self, ids: Tensor, gradients: Tensor) -> None:
        self._deliver(gradients)


@final
class ColumnWise(TableSharding):
    """The same columns of all rows on one rank, so that a lookup of few ids with wide rows is everybody's work.

    Only for optimizers that move every number of a row by itself.
    """

    def __init__(self, group: Group, prefetch_group: Group, dim: int) -> None:
        """Raise ConfigError where the ranks cannot have equal numbers of columns."""
        num_ranks = collectives.group_size(group)
        fix = "another placement, or a dim that the ranks divide"
        check(dim % num_ranks == 0, "table.dim", dim, f"a multiple of the {num_ranks} ranks, for columns", fix)
        self._now, self._ahead = group, prefetch_group
        width, self.rank = dim // num_ranks, collectives.group_rank(group)
        self.columns = slice(self.rank * width, (self.rank + 1) * width)

    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan:
        """See `TableSharding`."""
        asked, counts = _all_gather_rows(keys, self._ahead if ahead else self._now)
        own, positions = torch.unique(asked, return_inverse=True)
        num_keys, num_ranks = len(keys), len(counts)
        return ExchangePlan(
            inverse=torch.arange(num_keys),
            sent=(num_keys,) * num_ranks,
            received=tuple(counts),
            ids=own,
            positions=positions,
        )

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """See `TableSharding`."""
        anchor = torch.empty(0, requires_grad=True)
        output: Tensor = _ColumnExchange.apply(anchor, self._now, route, rows, deliver)  # type: ignore[no-untyped-call]
        return output


class _ColumnExchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _anchor: Tensor, group: Group, route: ExchangePlan, rows: FetchRows, deliver: Deliver
    ) -> Tensor:
        ctx.group, ctx.route, ctx.deliver = group, route, deliver
        assert route.positions is not None
        own = rows().index_select(0, route.positions)
        received = collectives.all_to_all(own, route.sent, route.received, group)
        num_ranks, num_keys, width = len(route.sent), route.sent[0], own.shape[1]
        return received.view(num_ranks, num_keys, width).transpose(0, 1).reshape(num_keys, num_ranks * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        route: ExchangePlan = ctx.route
        assert route.positions is not None
        num_ranks, num_keys = len(route.sent), route.sent[0]
        width = grad.shape[1] // num_ranks
        sent = grad.view(num_keys, num_ranks, width).transpose(0, 1).reshape(num_ranks * num_keys, width)
        parts = collectives.all_to_all(sent, route.received, route.sent, ctx.group)
        summed = parts.new_zeros(len(route.ids), width).index_add_(0, route.positions, parts)
        ctx.deliver(summed)
        return None, None, None, None, None


@final
class Replicated(TableSharding):
    """All rows on all ranks: a lookup sends nothing, and a step adds up the gradients of all ranks."""

    def __init__(self, group: Group, prefetch_group: Group) -> None:
        self._now, self._ahead = group, prefetch_group
        self.rank = collectives.group_rank(group)
        self.is_replicated = True
        self.counts_for_norm = self.saves_rows = self.rank == 0

    def plan_exchange(self, keys: Tensor, ahead: bool) -> None:
        """See `TableSharding`: all rows are here."""
        return

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        """There is no route to go along."""
        raise NotImplementedError

    def all_gather_keys(self, keys: Tensor, ahead: bool) -> Tensor:
        """See `TableSharding`."""
        asked, _ = _all_gather_rows(keys, self._ahead if ahead else self._now)
        distinct: Tensor = torch.unique(asked)
        return distinct

    def all_reduce_gradients(self, keys: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """See `TableSharding`."""
        all_keys, _ = _all_gather_rows(keys, self._now)
        parts, _ = _all_gather_rows(gradients, self._now)
        distinct, positions = torch.unique(all_keys, return_inverse=True)
        return distinct, parts.new_zeros(len(distinct), parts.shape[1]).index_add_(0, positions, parts)


def _all_gather_rows(rows: Tensor, group: Group) -> tuple[Tensor, list[int]]:
    """The rows [n, ...] of all ranks, in rank order, and how many each has."""
    num_ranks = collectives.group_size(group)
    counts: list[int] = collectives.all_gather(torch.tensor([len(rows)]), group, 0).tolist()
    repeated = rows.repeat(num_ranks, *[1] * (rows.dim() - 1))
    return collectives.all_to_all(repeated, counts, [len(rows)] * num_ranks, group), counts
