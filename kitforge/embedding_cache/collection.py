"""Several tables as one module, with one prefetcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Self, TypeVar, final

from torch import Tensor, nn

from kitforge.embedding_cache.lookup_input import flat_ids
from kitforge.embedding_cache.miss_ratio_curve import CacheEstimate
from kitforge.embedding_cache.prefetcher import EmbeddingPrefetcher, PrefetchClient
from kitforge.embedding_cache.stats import TableStats
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, nearest

Batch = TypeVar("Batch")
# What a feature gives: ids, or ids with offsets, or ids with offsets (or None) and weights.
Feature = Tensor | tuple[Tensor, ...] | tuple[Tensor, Tensor | None, Tensor | None]


@final
class EmbeddingCollection(nn.Module):
    """Tables by name, looked up by feature; features may share a table.

    The tables are submodules and move by themselves where a loop asks every `SparseModule` for its step.
    """

    def __init__(self, tables: Mapping[str, CachedEmbedding], features: Mapping[str, str] | None = None) -> None:
        """`features` names the table of each feature; without it every table is a feature of its own name."""
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        self.features = dict(features) if features is not None else {name: name for name in tables}
        for feature, name in self.features.items():
            check(name in tables, f"features.{feature}", name, "the name of a table", nearest(name, tables))

    def table_of(self, feature: str) -> CachedEmbedding:
        """The table that a feature looks up in."""
        if feature not in self.features:
            raise DataError(f"no table for the feature {feature!r}", fix=nearest(feature, self.features))
        table = self.tables[self.features[feature]]
        assert isinstance(table, CachedEmbedding)
        return table

    def forward(self, inputs: Mapping[str, Feature]) -> dict[str, Tensor]:
        """The vectors of every feature, in the order of the collection's features, as each table gives them."""
        return {
            feature: table(*(inputs[feature] if isinstance(inputs[feature], tuple) else (inputs[feature],)))
            for feature, table in self.lookups(inputs)
        }

    def lookups(self, inputs: Mapping[str, Feature]) -> list[tuple[str, CachedEmbedding]]:
        """The features of `inputs` with their tables, in the order in which they are looked up."""
        for name in inputs:
            self.table_of(name)
        return [(feature, self.table_of(feature)) for feature in self.features if feature in inputs]

    def prefetch(
        self,
        batches: Iterable[Batch],
        depth: int = 2,
        ids: Callable[[Batch], Mapping[str, Feature] | Iterable[Mapping[str, Feature]]] | None = None,
    ) -> Iterator[Batch]:
        """The batches as they are, while the rows of the next `depth` of them are moved by a thread.

        `ids` finds in a batch what `forward` will be called with, one mapping for each call; without it a batch is such
        a mapping itself. To leave the loop early, by whatever way, ends the thread and lets all rows go.
        """
        return iter(EmbeddingPrefetcher(batches, depth, _CollectionPrefetchClient(self, ids or _identity)))

    def estimate(self, batches: Iterable[Mapping[str, Feature]]) -> dict[str, CacheEstimate]:
        """What the tiers of each table that is asked will do with inputs like these, by its name. It moves nothing."""
        ids: dict[str, list[Tensor]] = {}
        for inputs in batches:
            for feature, _ in self.lookups(inputs):
                ids.setdefault(self.features[feature], []).append(ids_of(inputs[feature]))
        return {name: table.estimate(ids[name]) for name, table in self._named() if name in ids}

    def stats(self) -> dict[str, TableStats]:
        """What each table has counted so far, by its name."""
        return {name: table.stats() for name, table in self._named()}

    def close(self) -> None:
        """Let go of the threads, files and connections of all tables."""
        for table in self.cached_tables():
            table.close()

    def cached_tables(self) -> list[CachedEmbedding]:
        """Every table once."""
        return [table for _, table in self._named()]

    def _named(self) -> list[tuple[str, CachedEmbedding]]:
        return [(name, table) for name, table in self.tables.items() if isinstance(table, CachedEmbedding)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@final
class _CollectionPrefetchClient(PrefetchClient[Batch]):
    """The rows of all tables of a collection, ahead of their training."""

    def __init__(self, collection: EmbeddingCollection, ids: Callable[[Batch], Any]) -> None:
        self._collection, self._ids = collection, ids
        self._tables = collection.cached_tables()
        self.window = max((table.rows.manager.policy.window for table in self._tables), default=0)
        self.is_collective = any(table.rows.is_collective for table in self._tables)

    def on_future_access(self, batch: Batch) -> None:
        for table, ids in self._lookups(batch):
            table.rows.on_future_access(flat_ids(ids))

    def plan(self, batch: Batch) -> None:
        for table, ids in self._lookups(batch):
            table.prefetch_rows(ids)

    def trainer_waiting(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for table in self._tables:
            stack.enter_context(table.rows.pins.trainer_waiting())
        return stack

    def cancel(self) -> None:
        for table in self._tables:
            table.cancel_prefetch()

    def _lookups(self, batch: Batch) -> Iterator[tuple[CachedEmbedding, Tensor]]:
        given = self._ids(batch)
        for inputs in [given] if isinstance(given, Mapping) else given:
            for feature, table in self._collection.lookups(inputs):
                yield table, ids_of(inputs[feature])


def ids_of(value: Feature) -> Tensor:
    """The ids of what a feature gives."""
    return value[0] if isinstance(value, tuple) else value


def _identity(batch: Any) -> Any:
    return batch
