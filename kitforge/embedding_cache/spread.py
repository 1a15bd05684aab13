"""How the rows of one table are spread over ranks: the kinds of `Placement`, each a way to exchange.

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
from kitforge.core.parallel.table import Route, TableAxis, owner
from kitforge.foundation.config import check

# The rows [m, dim] of this rank as they are now, and what takes their gradients [m, dim].
Rows = Callable[[], Tensor]
Deliver = Callable[[Tensor], None]


class Spread(ABC):
    """Which rows of a table are on this rank, and how vectors and gradients find their way.

    All ranks call `route` and `vectors` alike, in the same order. Routes hold no values, so that `route` may run ahead,
    on a group of its own.
    """

    # The columns of a row that are here; None: all.
    columns: slice | None = None
    # Which share of all ids is here, and of how many.
    share: tuple[int, int] = (0, 1)

    # Whether a snapshot has the rows from this rank; else another rank has the same.
    gives_rows: bool = True
    # This rank's number among those that have the table.
    place: int = 0
    # Whether all ranks hold all rows, so that gradients have to be added up by `total`.
    is_replicated: bool = False
    # Whether the squares of this rank's gradients are its share of the norm; else another rank has the same rows.
    counts_for_norm: bool = True

    @property
    def owned(self) -> tuple[int, int] | None:
        """`share`, or None where no ids at all live here."""
        return self.share

    @abstractmethod
    def route(self, keys: Tensor, ahead: bool) -> Route | None:
        """Where distinct `keys` [u] live; None: here. `ahead`: by the group kept for a thread that runs ahead."""

    def together(self, keys: Tensor, ahead: bool) -> Tensor:
        """The distinct keys of all ranks, ascending. It is asked for where all ranks hold all rows and have to count
        alike; `ahead` as in `route`."""
        return keys

    @abstractmethod
    def vectors(self, route: Route, rows: Rows, deliver: Deliver) -> Tensor:
        """[u, dim], differentiable: `deliver` gets the sum over the ranks, in rank order."""

    def total(self, keys: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct keys and gradients of all ranks together. It is asked for where all ranks hold all rows."""
        return keys, gradients


@final
class ByRows(Spread):
    """Each row on one rank: by a hash of its id, or all of them on the rank `only`."""

    def __init__(self, group: Group, side_group: Group, only: int | None = None) -> None:
        def owner_of(ids: Tensor, num_ranks: int) -> Tensor:
            return owner(ids, num_ranks) if only is None else torch.full_like(ids, only)

        self._now, self._ahead = TableAxis(group, owner_of), TableAxis(side_group, owner_of)
        self.place, self._only = collectives.index(group), only
        if only is None:
            self.share = (self.place, collectives.size(group))

    @property
    def owned(self) -> tuple[int, int] | None:
        """See `Spread`."""
        return self.share if self._only in (None, self.place) else None

    def route(self, keys: Tensor, ahead: bool) -> Route:
        """See `Spread`."""
        return (self._ahead if ahead else self._now).plan(keys)

    def vectors(self, route: Route, rows: Rows, deliver: Deliver) -> Tensor:
        """See `Spread`."""
        return self._now.fetch(route, lambda _: rows(), _Sink(deliver))


@final
class _Sink:
    """A `GradientSink` that hands on what it gets; the ids are known to whoever made the route."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver

    def add(self, ids: Tensor, gradients: Tensor) -> None:
        self._deliver(gradients)


@final
class ByColumns(Spread):
    """The same columns of all rows on one rank, so that a lookup of few ids with wide rows is everybody's work.

    Only for optimizers that move every number of a row by itself.
    """

    def __init__(self, group: Group, side_group: Group, dim: int) -> None:
        """Raise ConfigError where the ranks cannot have equal numbers of columns."""
        num_ranks = collectives.size(group)
        fix = "another placement, or a dim that the ranks divide"
        check(dim % num_ranks == 0, "table.dim", dim, f"a multiple of the {num_ranks} ranks, for columns", fix)
        self._now, self._ahead = group, side_group
        width, self.place = dim // num_ranks, collectives.index(group)
        self.columns = slice(self.place * width, (self.place + 1) * width)

    def route(self, keys: Tensor, ahead: bool) -> Route:
        """See `Spread`."""
        asked, counts = _of_all(keys, self._ahead if ahead else self._now)
        own, places = torch.unique(asked, return_inverse=True)
        num_keys, num_ranks = len(keys), len(counts)
        return Route(
            inverse=torch.arange(num_keys),
            sent=(num_keys,) * num_ranks,
            received=tuple(counts),
            ids=own,
            places=places,
        )

    def vectors(self, route: Route, rows: Rows, deliver: Deliver) -> Tensor:
        """See `Spread`."""
        anchor = torch.empty(0, requires_grad=True)
        answer: Tensor = _Columns.apply(anchor, self._now, route, rows, deliver)  # type: ignore[no-untyped-call]
        return answer


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, group: Group, route: Route, rows: Rows, deliver: Deliver) -> Tensor:
        ctx.group, ctx.route, ctx.deliver = group, route, deliver
        assert route.places is not None
        own = rows().index_select(0, route.places)
        pieces = collectives.all_to_all(own, route.sent, route.received, group)
        num_ranks, num_keys, width = len(route.sent), route.sent[0], own.shape[1]
        return pieces.view(num_ranks, num_keys, width).transpose(0, 1).reshape(num_keys, num_ranks * width)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        route: Route = ctx.route
        assert route.places is not None
        num_ranks, num_keys = len(route.sent), route.sent[0]
        width = grad.shape[1] // num_ranks
        pieces = grad.view(num_keys, num_ranks, width).transpose(0, 1).reshape(num_ranks * num_keys, width)
        parts = collectives.all_to_all(pieces, route.received, route.sent, ctx.group)
        summed = parts.new_zeros(len(route.ids), width).index_add_(0, route.places, parts)
        ctx.deliver(summed)
        return None, None, None, None, None


@final
class OnAll(Spread):
    """All rows on all ranks: a lookup sends nothing, and a step adds up the gradients of all ranks."""

    def __init__(self, group: Group, side_group: Group) -> None:
        self._now, self._ahead = group, side_group
        self.place = collectives.index(group)
        self.is_replicated = True
        self.counts_for_norm = self.gives_rows = self.place == 0

    def route(self, keys: Tensor, ahead: bool) -> None:
        """See `Spread`: all rows are here."""
        return

    def vectors(self, route: Route, rows: Rows, deliver: Deliver) -> Tensor:
        """There is no route to go along."""
        raise NotImplementedError

    def together(self, keys: Tensor, ahead: bool) -> Tensor:
        """See `Spread`."""
        asked, _ = _of_all(keys, self._ahead if ahead else self._now)
        distinct: Tensor = torch.unique(asked)
        return distinct

    def total(self, keys: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
        """See `Spread`."""
        all_keys, _ = _of_all(keys, self._now)
        parts, _ = _of_all(gradients, self._now)
        distinct, places = torch.unique(all_keys, return_inverse=True)
        return distinct, parts.new_zeros(len(distinct), parts.shape[1]).index_add_(0, places, parts)


def _of_all(rows: Tensor, group: Group) -> tuple[Tensor, list[int]]:
    """The rows [n, ...] of all ranks, in rank order, and how many each has."""
    num_ranks = collectives.size(group)
    counts: list[int] = collectives.all_gather(torch.tensor([len(rows)]), group, 0).tolist()
    repeated = rows.repeat(num_ranks, *[1] * (rows.dim() - 1))
    return collectives.all_to_all(repeated, counts, [len(rows)] * num_ranks, group), counts
