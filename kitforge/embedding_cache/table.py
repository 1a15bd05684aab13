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

from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName, build_row_optimizer
from kitforge.core.optim.table_protocols import RowSource
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.gradients import GradientHandle, RowGradients, SlotGradients
from kitforge.embedding_cache.lookup_input import LookupInput, flat_ids, parse_lookup_input
from kitforge.embedding_cache.miss_ratio_curve import CacheEstimate, estimate
from kitforge.embedding_cache.options import CachedEmbeddingOptions, RemoteOptions
from kitforge.embedding_cache.pins import LookupHandle
from kitforge.embedding_cache.pooling import PooledLookup, Pooling, pooled_rows, pooled_vectors
from kitforge.embedding_cache.prefetched_lookups import PrefetchedLookups
from kitforge.embedding_cache.prefetcher import EmbeddingPrefetcher, PrefetchClient
from kitforge.embedding_cache.restore import part_name, restore
from kitforge.embedding_cache.sharding.strategies import TableSharding
from kitforge.embedding_cache.snapshot import SnapshotInfo, TableSnapshot
from kitforge.embedding_cache.stats import TableStats
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.redis_store import RedisStore
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.errors import DataError, ModelError

Batch = TypeVar("Batch")
# How the rows of tables are kept, for errors.
CHECKPOINT_HINT = "CheckpointWriter.attach and save, open_checkpoint(...).load_tables (docs/checkpoints.md)"


@final
class CachedEmbedding(nn.Module):
    """Rows of `dim` numbers for ids, in tiers of memory, with optimizers of their own.

    Rows are no parameters: backward passes leave their gradients here, `step` moves them, `clear_gradients` forgets
    them; what is looked up does not depend on tiers, policy or look-ahead by a single bit. `options` are the fields of
    `CachedEmbeddingOptions`, `optimizer` a rule or its name. `sharding` says how rows are spread over several: all
    of them then make the same lookups in the same order, with no ids where they have none.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        dim: int,
        *,
        optimizer: SparseOptimizerConfig | SparseOptimizerName = "adagrad",
        sharding: TableSharding | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        config = SparseOptimizerConfig(name=optimizer) if isinstance(optimizer, str) else optimizer
        self.optimizer = config
        given = CachedEmbeddingOptions(num_embeddings=num_embeddings, dim=dim, **options)
        _check_sharding(given, config, sharding)
        self.options = replace(given, remote=_last_tier(given, config, sharding))
        self.rows = RowCache(self.options, build_row_optimizer(config), sharding)
        self._sharding = sharding
        self._gradients = RowGradients(self.rows.device, self.rows.row_initializer.dim)
        self.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_report_missing_rows)  # type: ignore[no-untyped-call]
        # Called at any moment, so it does no more than it must.
        self._prefetched = PrefetchedLookups(lambda handle: self.rows.pins.close(handle.number))

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
        query = parse_lookup_input(self.options, ids, offsets, weights)
        handle = self._prefetched.pop(ids) or self.rows.plan(query.ids, ahead=False)
        # Whether it trains is known here, not where it was planned: batches ahead may be given up or looked at only.
        self.rows.admit(handle, is_counted=self.training and torch.is_grad_enabled())
        self.rows.catch_up(handle.slots)
        output = self._pool(handle, query)
        return output.reshape(*query.output_shape, self.options.dim)

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
        return iter(EmbeddingPrefetcher(batches, depth, _TablePrefetchClient(self, ids or _identity)))

    def prefetch_rows(self, ids: Tensor) -> None:
        """For the thread that runs ahead: have the rows in place for the next `forward` of this very tensor."""
        self.rows.plan(flat_ids(ids), ahead=True, keep=partial(self._prefetched.add, ids))

    def cancel_prefetch(self) -> None:
        """Lookups that were planned ahead and not made will not be."""
        self._prefetched.cancel_all()
        self.rows.manager.policy.cancel_future()

    def squared_norm(self) -> Tensor:
        """See `core.optim.sparse.SparseModule`."""
        self._all_reduce_gradients()
        square = self._gradients.squared_norm()
        return square if self._sharding is None or self._sharding.counts_for_norm else torch.zeros_like(square)

    def scale_gradients_(self, factor: float) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self._gradients.scale_(factor)

    def step(self, rate: float) -> None:
        """See `core.optim.sparse.SparseModule`."""
        self._all_reduce_gradients()
        self.rows.update(self._gradients.merged(), rate)
        self.clear_gradients()
        self.rows.expire()

    def clear_gradients(self) -> None:
        """See `core.optim.sparse.SparseModule`."""
        handles = self._gradients.handles
        self._gradients.clear()
        for handle in handles:
            self.rows.pins.close(handle.number)
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
            "init_scale": options.init_scale,
            "admission": to_dict(options.admission),
        }

    @property
    def shard(self) -> tuple[int, int]:
        """See `core.optim.rows.RowTable`."""
        return (0, 1) if self._sharding is None else self._sharding.shard

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> TableSnapshot:
        """See `core.optim.rows.RowTable`. A version is a number of steps."""
        rows, sharding = self.rows, self._sharding
        with rows.exclusive():
            changed, removed = (None, None) if since is None else rows.deltas.changes(since)
            rows.deltas.restart(rows.num_steps if is_base else None)
            moment = SnapshotInfo(
                schema=self.schema,
                version=rows.num_steps,
                since=since,
                state=rows.state(),
                shard=self.shard,
                part=part_name(None if sharding is None else sharding.columns),
                admission_counts=None if rows.admission.admits_all else rows.admission.counts(),
                changed=changed,
                removed=removed,
                saves_rows=sharding is None or sharding.saves_rows,
            )
            return TableSnapshot(rows, moment)

    def load_rows(self, source: RowSource) -> None:
        """See `core.optim.rows.RowTable`."""
        self.clear_gradients()
        sharding = self._sharding
        if sharding is None:
            restore(self.rows, source, None, (0, 1))
        else:
            restore(self.rows, source, sharding.columns, sharding.owned_shard)

    def estimate(self, batches: Iterable[Tensor]) -> CacheEstimate:
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
            fix=f"make a table with the same options and let it load a checkpoint: {CHECKPOINT_HINT}",
        )

    def extra_repr(self) -> str:
        """What `print` shows of the table."""
        return f"{self.options.num_embeddings}, {self.options.dim}, mode={self.options.mode}"

    def _pool(self, handle: LookupHandle, query: LookupInput) -> Tensor:
        deliver = GradientHandle(handle, self._gradients, self.rows.pins)
        route, device = handle.exchange, self.rows.device
        if route is None:
            pooling = Pooling(
                tier=device, dim=self.options.dim, slots=handle.slots, inverse=handle.inverse, bags=query.bags
            )
            output = pooled_rows(PooledLookup(pooling=pooling, buffer=deliver.buffer, deliver=deliver), query.weights)
        else:
            assert self._sharding is not None
            vectors = self._sharding.vectors(route, lambda: self._vectors_of(handle), deliver)
            positions = torch.arange(len(vectors))
            pooling = Pooling(
                tier=device, dim=self.options.dim, slots=positions, inverse=handle.inverse, bags=query.bags
            )
            output = pooled_vectors(vectors, pooling, query.weights)
        if not torch.is_grad_enabled():
            deliver.close()
        return output

    def _vectors_of(self, handle: LookupHandle) -> Tensor:
        device = self.rows.device
        with device.using() as slab:
            return device.kernels.embedding_bag(slab, device.to_device(handle.slots), self.rows.row_initializer.dim)

    def _all_reduce_gradients(self) -> None:
        """Where all ranks hold all rows: let each have the gradients of all ranks."""
        if self._sharding is None or not self._sharding.is_replicated or self._gradients.is_reduced:
            return
        part = self._gradients.merged()
        tier = self.rows.device
        keys = torch.empty(0, dtype=torch.int64) if part is None else tier.index.keys_at(part.slots)
        own = torch.empty(0, self.options.dim, device=tier.device) if part is None else part.gradients
        keys, gradients = self._sharding.all_reduce_gradients(keys, own)
        # Rows of which this rank had no gradient have to be here as well.
        handle = self.rows.plan(keys, ahead=False, is_gathered=True)
        self._gradients.set_reduced(handle, SlotGradients(slots=handle.slots, gradients=gradients))


@final
class _TablePrefetchClient(PrefetchClient[Batch]):
    """The rows of one table, ahead of its training."""

    def __init__(self, table: CachedEmbedding, ids: Callable[[Batch], Tensor | Iterable[Tensor]]) -> None:
        self._table, self._ids = table, ids
        self.window = table.rows.manager.policy.window
        self.is_collective = table.rows.is_collective

    def on_future_access(self, batch: Batch) -> None:
        for ids in self._tensors(batch):
            self._table.rows.on_future_access(flat_ids(ids))

    def plan(self, batch: Batch) -> None:
        for ids in self._tensors(batch):
            self._table.prefetch_rows(ids)

    def trainer_waiting(self) -> AbstractContextManager[Any]:
        return self._table.rows.pins.trainer_waiting()

    def cancel(self) -> None:
        self._table.cancel_prefetch()

    def _tensors(self, batch: Batch) -> list[Tensor]:
        given = self._ids(batch)
        tensors = [given] if isinstance(given, Tensor) else list(given)
        for ids in tensors:
            if not isinstance(ids, Tensor):
                raise DataError("prefetch needs the ids of a batch", got=type(ids).__name__, expected="tensors of ids")
        return tensors


def _refuse_state_dict(_: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise ModelError for a `state_dict` to be kept: rows are no parameters, so it would hold none of them. One of
    parameters as they live (`keep_vars`) is no copy of anything."""
    if not keep_vars:
        raise ModelError(
            f"a state_dict holds no rows of the table {prefix.removesuffix('.') or 'that it is asked of'!r}",
            fix=f"save a checkpoint: {CHECKPOINT_HINT}; or take dict(module.named_parameters())",
        )


def _report_missing_rows(*given: Any) -> None:
    """A hook before a state dict is loaded: it lacks the rows, which torch makes an error unless it is told
    `strict=False`."""
    _module, _state, prefix, _metadata, _strict, missing_keys, *_ = given
    missing_keys.append(f"{prefix}rows (load a checkpoint: {CHECKPOINT_HINT})")


def _check_sharding(
    options: CachedEmbeddingOptions, optimizer: SparseOptimizerConfig, sharding: TableSharding | None
) -> None:
    """Raise ConfigError for what a rank cannot decide by what it sees of a table."""
    if sharding is None or sharding.columns is None:
        return
    check(optimizer.name != "rowwise_adagrad", "sparse_optimizer.name", optimizer.name, "adagrad, for columns of rows")
    check(
        options.expiry.min_norm is None, "cache.expiry.min_norm", options.expiry.min_norm, "none, for columns of rows"
    )


def _last_tier(
    options: CachedEmbeddingOptions, optimizer: SparseOptimizerConfig, sharding: TableSharding | None
) -> RowStore | None:
    """The last tier: where a server is named, this rank's share of the rows there."""
    remote = options.remote
    if remote is None or isinstance(remote, RowStore):
        return remote
    server = RemoteOptions(url=remote) if isinstance(remote, str) else remote
    shard = (0, 1) if sharding is None else sharding.shard
    check(
        sharding is None or shard[1] > 1,
        "cache.remote",
        server.endpoint,
        "none but for rows that are spread by their ids",
    )
    schema = {"name": options.name, "dim": options.dim, "optimizer": to_dict(optimizer)}
    return RedisStore(server, schema, build_row_optimizer(optimizer).layout(options.dim).width, shard=shard)


def _identity(batch: Any) -> Any:
    return batch
