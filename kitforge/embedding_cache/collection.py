"""Several tables as one module, with one prefetcher."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from kitforge.core.nn.named_modules import NamedModules
from kitforge.embedding_cache.cache import RowCache
from kitforge.embedding_cache.miss_ratio_curve import CacheEstimate
from kitforge.embedding_cache.prefetcher import EmbeddingPrefetcher
from kitforge.embedding_cache.stats import TableStats
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, nearest

Batch = TypeVar("Batch")
# The input of a feature: ids, or ids with offsets, or ids with offsets (or None) and weights.
Feature = Tensor | tuple[Tensor, ...] | tuple[Tensor, Tensor | None, Tensor | None]


class EmbeddingCollection(nn.Module):
    """Tables by name, looked up by feature; features may share a table.

    The tables are submodules; a training loop that steps every `SparseModule` steps them.
    """

    def __init__(self, tables: Mapping[str, CachedEmbedding], features: Mapping[str, str] | None = None) -> None:
        """`features`: the table name of each feature; None: each table is a feature of the same name."""
        super().__init__()
        self.tables = NamedModules(tables)
        self.features = dict(features) if features is not None else {name: name for name in tables}
        for feature, name in self.features.items():
            check(name in tables, f"features.{feature}", name, "the name of a table", nearest(name, tables))

    def table_of(self, feature: str) -> CachedEmbedding:
        """The table of a feature. Raises DataError for an unknown feature."""
        if feature not in self.features:
            raise DataError(f"no table for the feature {feature!r}", fix=nearest(feature, self.features))
        table = self.tables[self.features[feature]]
        assert isinstance(table, CachedEmbedding)
        return table

    def forward(self, inputs: Mapping[str, Feature]) -> dict[str, Tensor]:
        """The output of the table of each feature in `inputs`, in the order of `features`."""
        return {
            feature: table(*(inputs[feature] if isinstance(inputs[feature], tuple) else (inputs[feature],)))
            for feature, table in self.lookups(inputs)
        }

    def lookups(self, inputs: Mapping[str, Feature]) -> list[tuple[str, CachedEmbedding]]:
        """The features of `inputs` with their tables, in the order of the lookups."""
        for name in inputs:
            self.table_of(name)
        return [(feature, self.table_of(feature)) for feature in self.features if feature in inputs]

    def prefetch(
        self,
        batches: Iterable[Batch],
        depth: int = 2,
        ids: Callable[[Batch], Mapping[str, Feature] | Iterable[Mapping[str, Feature]]] | None = None,
    ) -> Iterator[Batch]:
        """The same batches, while a thread moves the rows of the next `depth` of them to the device tier.

        `ids` returns the arguments that `forward` will be called with for a batch, one mapping for each call; without
        it a batch is such a mapping. Leaving the loop early, in any way, ends the thread and unpins all rows.
        """

        def lookups(batch: Batch) -> Iterator[tuple[RowCache, Tensor]]:
            given: Any = batch if ids is None else ids(batch)
            for inputs in [given] if isinstance(given, Mapping) else given:
                for feature, table in self.lookups(inputs):
                    yield table.rows, _ids_of(inputs[feature])

        return iter(EmbeddingPrefetcher(batches, depth, [table.rows for table in self.cached_tables()], lookups))

    def estimate(self, batches: Iterable[Mapping[str, Feature]]) -> dict[str, CacheEstimate]:
        """The `estimate` of each table that these inputs look up, by table name. It moves nothing."""
        ids: dict[str, list[Tensor]] = {}
        for inputs in batches:
            for feature, _ in self.lookups(inputs):
                ids.setdefault(self.features[feature], []).append(_ids_of(inputs[feature]))
        return {
            name: table.estimate(ids[name])
            for name, table in zip(self.tables, self.cached_tables(), strict=True)
            if name in ids
        }

    def stats(self) -> dict[str, TableStats]:
        """The `stats` of each table, by name."""
        return {name: table.stats() for name, table in zip(self.tables, self.cached_tables(), strict=True)}

    def close(self) -> None:
        """Release the threads, files and connections of all tables."""
        for table in self.cached_tables():
            table.close()

    def cached_tables(self) -> list[CachedEmbedding]:
        """Every table once."""
        return [table for table in self.tables.values() if isinstance(table, CachedEmbedding)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _ids_of(value: Feature) -> Tensor:
    return value[0] if isinstance(value, tuple) else value
