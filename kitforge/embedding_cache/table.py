"""A cached embedding table: the interface of `nn.EmbeddingBag` over rows in tiers of memory.

A lookup may be planned long before it is computed: planning decides where its rows live and pins them. Values are read
only when the lookup is computed, so they are never stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, SparseOptimizerName, build_row_optimizer
from kitforge.core.optim.table_protocols import RowSource
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.lookup import (
    GradientHandle,
    LookupInput,
    PooledRows,
    PooledVectors,
    Pooling,
    RowGradients,
    SlotGradients,
    parse_lookup_input,
)
from kitforge.embedding_cache.miss_ratio_curve import CacheEstimate, estimate
from kitforge.embedding_cache.options import CachedEmbeddingOptions, RemoteOptions
from kitforge.embedding_cache.pins import LookupHandle
from kitforge.embedding_cache.prefetcher import EmbeddingPrefetcher
from kitforge.embedding_cache.sharding.replicated import Replicated
from kitforge.embedding_cache.sharding.strategy import TableSharding
from kitforge.embedding_cache.snapshot import TableSnapshot, restore
from kitforge.embedding_cache.stats import TableStats
from kitforge.embedding_cache.store import RowStore
from kitforge.embedding_cache.tiers.redis import RedisStore
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.log import logger, warn_once

Batch = TypeVar("Batch")
# How to save tables, for errors.
CHECKPOINT_HINT = "CheckpointWriter.attach and save, open_checkpoint(...).load_tables (docs/checkpoints.md)"

_log = logger(__name__)
# Tables that were given no name and are still there: a table cannot see the network that it becomes a part of.
_unnamed: WeakSet[CachedEmbedding] = WeakSet()


class CachedEmbedding(nn.Module):
    """Rows of `dim` numbers by id, in tiers of memory, with a row-wise optimizer.

    Rows are no parameters: backward passes leave their gradients here, `step` applies them, `clear_gradients` drops
    them. Tiers, eviction policy and prefetching do not change a single bit of the results. `options` are the fields of
    `CachedEmbeddingOptions`, `optimizer` a config or its name. With `sharding` over several ranks, all ranks make the
    same lookups in the same order, with no ids where they have none.
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
        if sharding is not None and sharding.columns is not None:
            expected = "adagrad, for column-wise sharding"
            check(config.name != "rowwise_adagrad", "sparse_optimizer.name", config.name, expected)
            norm = given.expiry.min_norm
            check(norm is None, "cache.expiry.min_norm", norm, "none, for column-wise sharding")
        self.options: CachedEmbeddingOptions = replace(given, remote=_remote_tier(given, config, sharding))
        if given.name == "table":  # the default
            if any(each.options.seed == given.seed for each in _unnamed):
                warn_once(_log, "tables without a name start with equal rows by id: give each a name of its own")
            _unnamed.add(self)
        self.rows = RowCache(self.options, build_row_optimizer(config), sharding)
        # The largest learning rate of its rows; None: that of the run.
        self.learning_rate = config.learning_rate
        # The width of the output of `forward`.
        self.embedding_dim = dim
        self._sharding = sharding
        self.shard: tuple[int, int] = (0, 1) if sharding is None else sharding.shard
        self._gradients = RowGradients(self.rows.device, self.rows.row_initializer.dim)
        self.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_report_missing_rows)  # type: ignore[no-untyped-call]

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """mode None: the rows [..., dim] of ids [...]. Else bags, as ids [num_bags, n] or flat ids [N] with offsets,
        pooled to [num_bags, dim]; `weights`, of the shape of the ids, multiply rows before pooling.

        The values are those after the last step. Raises DataError for invalid ids and bags.
        """
        if torch.compiler.is_compiling():
            # Which rows are moved is decided in Python. As a decorator, this would import the compiler with the module.
            return torch.compiler.disable(self.forward)(ids, offsets, weights)  # type: ignore[no-untyped-call, no-any-return]
        query = parse_lookup_input(self.options, ids, offsets, weights)
        handle = self.rows.prefetched.pop(ids) or self.rows.plan(query.ids, ahead=False)
        # Training lookups are counted here, not where they are planned: batches planned ahead may be dropped.
        self.rows.admit(handle, is_counted=self.training and torch.is_grad_enabled())
        self.rows.catch_up(handle.slots, handle.device_slots)
        output = self._pool(handle, query)
        return output.reshape(*query.output_shape, self.options.dim)

    def prefetch(
        self, batches: Iterable[Batch], depth: int = 2, ids: Callable[[Batch], Tensor | Iterable[Tensor]] | None = None
    ) -> Iterator[Batch]:
        """The same batches, while a thread moves the rows of the next `depth` of them to the device tier.

        `ids` returns the tensors of a batch that `forward` will be called with, in that order; without it a batch is
        such a tensor. Leaving the loop early, in any way, ends the thread and unpins all rows.
        """

        def lookups(batch: Batch) -> list[tuple[RowCache, Tensor]]:
            given: Any = batch if ids is None else ids(batch)
            tensors = [given] if isinstance(given, Tensor) else list(given)
            for each in tensors:
                if not isinstance(each, Tensor):
                    expected = "tensors of ids"
                    raise DataError("prefetch needs the ids of a batch", got=type(each).__name__, expected=expected)
            return [(self.rows, each) for each in tensors]

        return iter(EmbeddingPrefetcher(batches, depth, [self.rows], lookups))

    def squared_norm(self) -> Tensor:
        """See `core.optim.row_optimizers.SparseModule`."""
        self._all_reduce_gradients()
        square = self._gradients.squared_norm()
        return square if self._sharding is None or self._sharding.counts_for_norm else torch.zeros_like(square)

    def scale_gradients_(self, factor: float) -> None:
        """See `core.optim.row_optimizers.SparseModule`."""
        for part in self._gradients.parts:
            part.gradients.mul_(factor)

    def step(self, rate: float) -> None:
        """See `core.optim.row_optimizers.SparseModule`."""
        self._all_reduce_gradients()
        self.rows.update(self._gradients.merged(), rate)
        self.clear_gradients()
        self.rows.expire()

    def clear_gradients(self) -> None:
        """See `core.optim.row_optimizers.SparseModule`."""
        handles = self._gradients.handles
        self._gradients.clear()
        for handle in handles:
            self.rows.pins.close(handle.number)
        self.rows.admission.end_step()

    @property
    def schema(self) -> Mapping[str, Any]:
        """See `core.optim.table_protocols.RowTable`: what identifies the rows of this table, wherever they live."""
        options = self.options
        return {
            "name": options.name,
            "num_embeddings": options.num_embeddings,
            "dim": options.dim,
            "width": self.rows.optimizer.layout(options.dim).width,
            "optimizer": to_dict(self.optimizer, is_whole=True),
            "seed": options.seed,
            "initial": options.initial,
            "init_scale": options.init_scale,
            "admission": to_dict(options.admission, is_whole=True),
        }

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> TableSnapshot:
        """See `core.optim.table_protocols.RowTable`. A version is a number of steps."""
        with self.rows.exclusive():
            return TableSnapshot(self.rows, self.schema, self._sharding, since, is_base=is_base)

    def load_rows(self, source: RowSource) -> None:
        """See `core.optim.table_protocols.RowTable`."""
        self.clear_gradients()
        restore(self.rows, source, self._sharding)

    def estimate(self, batches: Iterable[Tensor]) -> CacheEstimate:
        """The bytes of each tier, and hit rates by size, for batches of ids like these. It moves nothing."""
        return estimate(self.options, self.rows.layout.width, batches)

    def stats(self) -> TableStats:
        """The counts so far: hits by tier, rows moved, waits."""
        return self.rows.stats()

    def close(self) -> None:
        """Release threads, files and connections. The table is not used afterwards."""
        self.rows.tiers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ModelError; `copy.deepcopy`, `torch.save` and `pickle` call it."""
        raise ModelError(
            f"the table {self.options.name!r} cannot be copied or pickled: its rows may be in files or on a server",
            fix=f"make a table with the same options and let it load a checkpoint: {CHECKPOINT_HINT}",
        )

    def extra_repr(self) -> str:
        """The options shown by `print`."""
        return f"{self.options.num_embeddings}, {self.options.dim}, mode={self.options.mode}"

    def _pool(self, handle: LookupHandle, query: LookupInput) -> Tensor:
        device, dim = self.rows.device, self.options.dim
        deliver = GradientHandle(handle, self._gradients, device, self.rows.pins)
        output: Tensor
        bags = query.bags
        if bags is not None and device.device.type != "cpu":
            weights = None if bags.weights is None else copy_to(bags.weights, device.device)
            bags = replace(bags, offsets=copy_to(bags.offsets, device.device), weights=weights)
        new_pooling = partial(Pooling, tier=device, dim=dim, inverse=handle.inverse, bags=query.bags, device_bags=bags)
        if handle.exchange is None:
            pooling = new_pooling(slots=handle.device_slots)
            anchor = torch.empty(0, requires_grad=True)
            output = PooledRows.apply(anchor, query.weights, pooling, deliver)  # type: ignore[no-untyped-call]
        else:
            assert self._sharding is not None
            vectors = self._sharding.vectors(handle.exchange, lambda: self._vectors_of(handle), deliver)
            positions = torch.arange(len(vectors), device=device.device)
            pooling = new_pooling(slots=positions)
            output = PooledVectors.apply(vectors, query.weights, pooling)  # type: ignore[no-untyped-call]
        if not torch.is_grad_enabled():
            deliver.close()
        return output

    def _vectors_of(self, handle: LookupHandle) -> Tensor:
        device = self.rows.device
        with device.slab_lock:
            return device.kernels.embedding_bag(device.slab, handle.device_slots, self.rows.row_initializer.dim)

    def _all_reduce_gradients(self) -> None:
        """With replicas on all ranks, sum the gradients of all ranks, once a step."""
        if not isinstance(self._sharding, Replicated) or self._gradients.is_reduced:
            return
        part = self._gradients.merged()
        tier = self.rows.device
        keys = torch.empty(0, dtype=torch.int64) if part is None else tier.index.keys_at(part.slots)
        own = torch.empty(0, self.options.dim, device=tier.device) if part is None else part.gradients
        keys, gradients = self._sharding.all_reduce_gradients(keys, own)
        # Rows for which only other ranks had gradients must be resident as well.
        handle = self.rows.plan(keys, ahead=False, is_gathered=True)
        self._gradients.parts = [
            SlotGradients(slots=handle.slots, device_slots=handle.device_slots, gradients=gradients)
        ]
        self._gradients.handles.append(handle)
        self._gradients.is_reduced = True


def _refuse_state_dict(_: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise ModelError for a `state_dict` to be saved: it would lack the rows, which are no parameters. With
    `keep_vars` it refers to the live parameters and saves nothing."""
    if not keep_vars:
        raise ModelError(
            f"a state_dict holds no rows of the table {prefix.removesuffix('.') or 'itself'!r}",
            fix=f"save a checkpoint: {CHECKPOINT_HINT}; or take dict(module.named_parameters())",
        )


def _report_missing_rows(*given: Any) -> None:
    """A hook before a state dict is loaded: it reports the rows as missing, an error unless `strict=False`."""
    _module, _state, prefix, _metadata, _strict, missing_keys, *_ = given
    missing_keys.append(f"{prefix}rows (load a checkpoint: {CHECKPOINT_HINT})")


def _remote_tier(
    options: CachedEmbeddingOptions, optimizer: SparseOptimizerConfig, sharding: TableSharding | None
) -> RowStore | None:
    """The last tier; for a server, a store for this rank's shard."""
    remote = options.remote
    if remote is None or isinstance(remote, RowStore):
        return remote
    server = RemoteOptions(url=remote) if isinstance(remote, str) else remote
    shard = (0, 1) if sharding is None else sharding.shard
    check(sharding is None or shard[1] > 1, "cache.remote", server.endpoint, "none, except with row-wise sharding")
    schema = {"name": options.name, "dim": options.dim, "optimizer": to_dict(optimizer, is_whole=True)}
    return RedisStore(server, schema, build_row_optimizer(optimizer).layout(options.dim).width, shard=shard)
