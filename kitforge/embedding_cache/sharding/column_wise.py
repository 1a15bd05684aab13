"""Column-wise sharding: the same columns of all rows on one rank.

Legend: u distinct ids looked up on this rank, m distinct rows that this rank holds of those looked up on all ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.parallel import collectives
from kitforge.core.parallel.collectives import Group
from kitforge.core.parallel.table import ExchangePlan
from kitforge.embedding_cache.sharding.strategy import Deliver, FetchRows, TableSharding, all_gather_rows
from kitforge.foundation.config import check


class ColumnWise(TableSharding):
    """Each rank holds the same number of columns of every row, so that all ranks share the work of wide rows.

    Only for optimizers that update every number of a row by itself.
    """

    def __init__(self, group: Group, prefetch_group: Group, dim: int) -> None:
        """Raise ConfigError unless the number of ranks divides `dim`."""
        super().__init__(group, prefetch_group)
        num_ranks = collectives.group_size(group)
        fix = "choose another sharding type, or a dim that the number of ranks divides"
        check(dim % num_ranks == 0, "table.dim", dim, f"a multiple of the {num_ranks} ranks, for columns", fix)
        width = dim // num_ranks
        self.columns = slice(self.rank * width, (self.rank + 1) * width)

    def plan_exchange(self, keys: Tensor, ahead: bool) -> ExchangePlan:
        asked, counts = all_gather_rows(keys, self._groups[ahead])
        own, positions = torch.unique(asked, return_inverse=True)
        return ExchangePlan(
            inverse=torch.arange(len(keys)),
            sent=(len(keys),) * len(counts),
            received=tuple(counts),
            ids=own,
            positions=positions,
        )

    def vectors(self, route: ExchangePlan, rows: FetchRows, deliver: Deliver) -> Tensor:
        # Autograd calls the backward pass only of what depends on a tensor that requires a gradient.
        anchor = torch.empty(0, requires_grad=True)
        group = self._groups[False]
        output: Tensor = _ColumnExchange.apply(anchor, group, route, rows, deliver)  # type: ignore[no-untyped-call]
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
        ctx.deliver(parts.new_zeros(len(route.ids), width).index_add_(0, route.positions, parts))
        return None, None, None, None, None
