"""An embedding with the face of `nn.EmbeddingBag` whose rows may live anywhere.

A lookup is planned at any time before it is computed: where its rows live, and how long they have to stay. Values are
read only when it is computed, so no plan can make them stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar, final

import torch
from torch import Tensor, nn

from kitforge.core.optim.rows import RowSource
from kitforge.core.optim.sparse import SparseOptimizerConfig, SparseOptimizerName, build_row_optimizer
from kitforge.embedding_cache.boundary import Boundary, Moment
from kitforge.embedding_cache.claims import Claims
from kitforge.embedding_cache.estimate import Estimate, estimate
from kitforge.embedding_cache.gradients import Delivery, Part, RowGradients
from kitforge.embedding_cache.options import RemoteOptions, TableOptions
from kitforge.embedding_cache.pooling import Lookup, Pooling, pooled_rows, pooled_vectors
from kitforge.embedding_cache.prefetcher import Advance, Prefetcher
from kitforge.embedding_cache.query import Query, flat_ids, read_query
from kitforge.embedding_cache.restore import part_name, restore
from kitforge.embedding_cache.row_cache import RowCache
from kitforge.embedding_cache.spread import Spread
from kitforge.embedding_cache.stats import TableStats
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tickets import Ticket
from kitforge.embedding_cache.tiers.remote import RemoteStore
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.errors import DataError, ModelError

Batch = TypeVar("Batch")
# How the rows of tables are kept, for errors.
CHECKPOINTS = "CheckpointWriter.attach and save, open_checkpoint(...).load_tables (docs/checkpoints.md)"


@final
class CachedEmbedding(nn.Module):
    """Rows of `dim` numbers for ids, in tiers of memory, with optimizers of their own.

    Rows are no parameters: backward passes leave their gradients here, `step` moves them, `clear_gradients` forgets
    them; what is looked up does not depend on tiers, policy or look-ahead by a single bit. `options` are the fields of
    `TableOptions`, `optimizer` a rule or its name. `ranks` says how rows are spread over several: all
    of them then make the same lookups in the same order, with no ids where they have none.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        dim: int,
        *,
        optimizer: SparseOptimizerConfig | SparseOptimizerName = "adagrad",
        ranks: Spread | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = SparseOptimizerConfig(name=optimizer) if isinstance(optimizer, str) else optimizer
        self.optimizer = config
        given = TableOptions(num_embeddings=num_embeddings, dim=dim, **options)
        _check_ranks(given, config, ranks)
        self.options = replace(given, remote=_store_of(given, config, ranks))
        self.rows = RowCache(self.options, build_row_optimizer(config), ranks)
        self._spread = ranks
        self._gradients = RowGradients(self.rows.device, self.rows.initial.dim)
        self.register_state_dict_pre_hook(_refuse_to_leave_rows_out)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_miss_rows)  # type: ignore[no-untyped-call]
        # Called at any moment, so it does no more than it must.
        self._claims = Claims(lambda ticket: self.rows.register.close(ticket.number))

    @property
    def learning_rate(self) -> float | None:
        """The largest rate of its rows; None: that of the run."""
        return self.optimizer.learning_rate

    @property
    def embedding_dim(self) -> int:
        """The width of what `forward` gives."""
        return self.options.dim

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """mode None: the rows [..., dim] of ids [...]. Else bags of ids [num_bags, n], or of flat ids [N] and offsets,
        put together to [num_bags, dim]; `weights`, of the shape of the ids, multiply rows before that.

        The values are those after the last step. Raises DataError for ids that cannot be, and for unclear bags.
        """
        query = read_query(self.options, ids, offsets, weights)
        ticket = self._claims.take(ids) or self.rows.plan(query.ids, ahead=False)
        # Whether it trains is known here, not where it was planned: batches ahead may be given up or looked at only.
        self.rows.admit(ticket, is_counted=self.training and torch.is_grad_enabled())
        self.rows.catch_up(ticket.slots)
        answer = self._answer(ticket, query)
        return answer.reshape(*query.shape, self.options.dim)

    def prefetch(
        self,
        batches: Iterable[Batch],
        depth: int = 2,
        ids: Callable[[Batch], Tensor | Iterable[Tensor]] | None = None,
    ) -> Iterator[Batch]:
        """The batches as they are, while the rows of the next `depth` of them are moved by a thread.

        `ids` finds in a batch the tensors that `forward` will be called with, in that order; without it a batch is such
        a tensor. To leave the loop early, by whatever way, ends the thread and lets all rows go.
        """
        return iter(Prefetcher(batches, depth, _TableAdvance(self, ids or _itself)))

    def plan_ahead(self, ids: Tensor) -> None:
        """For the thread that runs ahead: have the rows in place for the next `forward` of this very tensor."""
        self.rows.plan(flat_ids(ids), ahead=True, keep=partial(self._claims.add, ids))

    def give_up_ahead(self) -> None:
        """Lookups that were planned ahead and not made will not be."""
        self._claims.drop()
        self.rows.planner.policy.expect_nothing()

    def squared_norm(self) -> Tensor:
        """See `core.optim.sparse.SparseModule`."""
        self._total()
        square = self._gradients.squared_norm()
        return square if self._spread is None or self._spread.counts_for_norm else torch.zeros_like(square)

    def scale_gradients_(self, factor: float) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self._gradients.scale_(factor)

    def step(self, rate: float) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self._total()
        self.rows.update(self._gradients.merged(), rate)
        self.clear_gradients()
        self.rows.forget()

    def clear_gradients(self) -> None:
        """See `core.optim.sparse.SparseModule`."""
        tickets = self._gradients.tickets
        self._gradients.clear()
        for ticket in tickets:
            self.rows.register.close(ticket.number)
        self.rows.admission.end_step()

    @property
    def schema(self) -> Mapping[str, Any]:
        """See `core.optim.rows.RowTable`: what makes rows this table's, wherever they live."""
        options = self.options
        return {
            "name": options.name,
            "num_embeddings": options.num_embeddings,
            "dim": options.dim,
            "width": self.rows.optimizer.layout(options.dim).width,
            "optimizer": to_dict(self.optimizer),
            "seed": options.seed,
            "initial": options.initial,
            "spread": options.spread,
            "admission": to_dict(options.admission),
        }

    @property
    def share(self) -> tuple[int, int]:
        """See `core.optim.rows.RowTable`."""
        return (0, 1) if self._spread is None else self._spread.share

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> Boundary:
        """See `core.optim.rows.RowTable`. A version is a number of steps."""
        rows, spread = self.rows, self._spread
        with rows.interrupt():
            changed, removed = (None, None) if since is None else rows.deltas.changes(since)
            rows.deltas.restart(rows.num_steps if is_base else None)
            moment = Moment(
                schema=self.schema,
                version=rows.num_steps,
                since=since,
                state=rows.state(),
                share=self.share,
                part=part_name(None if spread is None else spread.columns),
                counted=None if rows.admission.admits_all else rows.admission.counts(),
                changed=changed,
                removed=removed,
                yields=spread is None or spread.gives_rows,
            )
            return Boundary(rows, moment)

    def load_rows(self, source: RowSource) -> None:
        """See `core.optim.rows.RowTable`."""
        self.clear_gradients()
        spread = self._spread
        if spread is None:
            restore(self.rows, source, None, (0, 1))
        else:
            restore(self.rows, source, spread.columns, spread.owned)

    def estimate(self, batches: Iterable[Tensor]) -> Estimate:
        """What the tiers will do with batches of ids like these: bytes, and hit rates by size. It moves nothing."""
        return estimate(self.options, self.rows.layout.width, batches)

    def stats(self) -> TableStats:
        """Where rows were found so far, how many moved, who waited."""
        return self.rows.stats()

    def close(self) -> None:
        """Let go of threads, files and connections. The table is not used afterwards."""
        self.rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ModelError: what `copy.deepcopy`, `torch.save` and `pickle` ask for."""
        raise ModelError(
            f"the table {self.options.name!r} cannot be copied or pickled: its rows may be in files or on a server",
            fix=f"make a table with the same options and let it load a checkpoint: {CHECKPOINTS}",
        )

    def extra_repr(self) -> str:
        """What `print` shows of the table."""
        return f"{self.options.num_embeddings}, {self.options.dim}, mode={self.options.mode}"

    def _answer(self, ticket: Ticket, query: Query) -> Tensor:
        deliver = Delivery(ticket, self._gradients, self.rows.register)
        route, device = ticket.route, self.rows.device
        if route is None:
            pooling = Pooling(
                tier=device, dim=self.options.dim, slots=ticket.slots, inverse=ticket.inverse, bags=query.bags
            )
            answer = pooled_rows(Lookup(pooling=pooling, buffer=deliver.buffer, deliver=deliver), query.weights)
        else:
            assert self._spread is not None
            vectors = self._spread.vectors(route, lambda: self._vectors_of(ticket), deliver)
            places = torch.arange(len(vectors))
            pooling = Pooling(tier=device, dim=self.options.dim, slots=places, inverse=ticket.inverse, bags=query.bags)
            answer = pooled_vectors(vectors, pooling, query.weights)
        if not torch.is_grad_enabled():
            deliver.close()
        return answer

    def _vectors_of(self, ticket: Ticket) -> Tensor:
        device = self.rows.device
        with device.using() as slab:
            return device.kernels.gather_pool(slab, device.there(ticket.slots), self.rows.initial.dim)

    def _total(self) -> None:
        """Where all ranks hold all rows: let each have the gradients of all ranks."""
        if self._spread is None or not self._spread.is_replicated or self._gradients.is_total:
            return
        part = self._gradients.merged()
        tier = self.rows.device
        keys = torch.empty(0, dtype=torch.int64) if part is None else tier.index.keys_at(part.slots)
        own = torch.empty(0, self.options.dim, device=tier.device) if part is None else part.gradients
        keys, gradients = self._spread.total(keys, own)
        # Rows of which this rank had no gradient have to be here as well.
        ticket = self.rows.plan(keys, ahead=False, is_told=True)
        self._gradients.set_total(ticket, Part(slots=ticket.slots, gradients=gradients))


@final
class _TableAdvance(Advance[Batch]):
    """The rows of one table, ahead of its training."""

    def __init__(self, table: CachedEmbedding, ids: Callable[[Batch], Tensor | Iterable[Tensor]]) -> None:
        self._table, self._ids = table, ids
        self.window = table.rows.planner.policy.window
        self.is_joint = table.rows.is_joint

    def expect(self, batch: Batch) -> None:
        for ids in self._tensors(batch):
            self._table.rows.expect(flat_ids(ids))

    def plan(self, batch: Batch) -> None:
        for ids in self._tensors(batch):
            self._table.plan_ahead(ids)

    def waiting(self) -> AbstractContextManager[Any]:
        return self._table.rows.register.waiting()

    def give_up(self) -> None:
        self._table.give_up_ahead()

    def _tensors(self, batch: Batch) -> list[Tensor]:
        given = self._ids(batch)
        tensors = [given] if isinstance(given, Tensor) else list(given)
        for ids in tensors:
            if not isinstance(ids, Tensor):
                raise DataError("prefetch needs the ids of a batch", got=type(ids).__name__, expected="tensors of ids")
        return tensors


def _refuse_to_leave_rows_out(_: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise ModelError for a `state_dict` to be kept: rows are no parameters, so it would hold none of them. One of
    parameters as they live (`keep_vars`) is no copy of anything."""
    if not keep_vars:
        raise ModelError(
            f"a state_dict holds no rows of the table {prefix.removesuffix('.') or 'that it is asked of'!r}",
            fix=f"save a checkpoint: {CHECKPOINTS}; or take dict(module.named_parameters()) for the parameters alone",
        )


def _miss_rows(*given: Any) -> None:
    """A hook before a state dict is loaded: it lacks the rows, which torch makes an error unless it is told
    `strict=False`."""
    _module, _state, prefix, _metadata, _strict, missing_keys, *_ = given
    missing_keys.append(f"{prefix}rows (load a checkpoint: {CHECKPOINTS})")


def _check_ranks(options: TableOptions, optimizer: SparseOptimizerConfig, ranks: Spread | None) -> None:
    """Raise ConfigError for what a rank cannot decide by what it sees of a table."""
    if ranks is None or ranks.columns is None:
        return
    check(optimizer.name != "rowwise_adagrad", "sparse_optimizer.name", optimizer.name, "adagrad, for columns of rows")
    check(
        options.forgetting.norm is None, "cache.forgetting.norm", options.forgetting.norm, "none, for columns of rows"
    )


def _store_of(options: TableOptions, optimizer: SparseOptimizerConfig, ranks: Spread | None) -> RowStore | None:
    """The last tier: where a server is named, this rank's share of the rows there."""
    remote = options.remote
    if remote is None or isinstance(remote, RowStore):
        return remote
    server = RemoteOptions(url=remote) if isinstance(remote, str) else remote
    share = (0, 1) if ranks is None else ranks.share
    check(ranks is None or share[1] > 1, "cache.remote", server.place, "none but for rows that are spread by their ids")
    schema = {"name": options.name, "dim": options.dim, "optimizer": to_dict(optimizer)}
    return RemoteStore(server, schema, build_row_optimizer(optimizer).layout(options.dim).width, share=share)


def _itself(batch: Any) -> Any:
    return batch
