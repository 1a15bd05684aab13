"""Computes `FeatureStatistics` in one pass over the training rows, and a second one if features are crossed."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.columns import ColumnTable, NamedColumns
from kitforge.data.tables.frequency_counter import FrequencyCounter
from kitforge.data.tables.split import RowSet
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.features import (
    CollisionStats,
    FeatureEncoder,
    FeatureStatistics,
    IdEncoding,
    Moments,
    common_precision,
    feature_keys,
    feature_tables,
    table_features,
    transform,
)
from kitforge.kits.recommender.schema import BucketFeature, FeatureSchema, IdFeature, NumericFeature

_CHUNK_ROWS = 65_536
# Distinct values of a table that are counted exactly, 16 bytes each; above, a sample is counted.
_COUNTED_VALUES = 2**20
# Values of a quantile estimate; above, a sample is used.
_QUANTILE_VALUES = 2**20
_SALT = 0x14057B7EF767814F


def fit_features(schema: FeatureSchema, table: ColumnTable, training: RowSet) -> FeatureStatistics:
    """The statistics of the training rows only."""
    if training.num_rows == 0:
        raise DataError("there is nothing to train on", got="no training rows", expected="at least one")
    passed = _Pass(schema)
    for rows, columns in _chunks(table, training):
        passed.add(rows, columns)
    statistics = passed.statistics()
    if not schema.crosses:
        return statistics
    encoder = FeatureEncoder(schema, statistics)
    tallies = {name: FrequencyCounter(_COUNTED_VALUES) for name in schema.crosses}
    for _, columns in _chunks(table, training):
        for name, keys in encoder.cross_keys(columns).items():
            tallies[name].add(keys)
    crossed = {
        name: _collision_stats(name, counter, schema.crosses[name].num_buckets) for name, counter in tallies.items()
    }
    return passed.statistics(crossed)


def _chunks(table: ColumnTable, training: RowSet) -> Iterator[tuple[NDArray[np.int64], NamedColumns]]:
    for start in range(0, training.num_rows, _CHUNK_ROWS):
        rows = training.rows(np.arange(start, min(start + _CHUNK_ROWS, training.num_rows)))
        yield rows, NamedColumns(table.rows(rows), table.layout)


class _Pass:
    """Counts and sums of the rows so far."""

    def __init__(self, schema: FeatureSchema) -> None:
        self._schema = schema
        self._moments = {name: _Moments(feature) for name, feature in schema.numeric.items()}
        self._samples: dict[str, _Sample] = {
            name: _Sample() for name, feature in schema.bucketed.items() if feature.edges is None
        }
        self._tables = feature_tables(schema)
        self._features = {name: item for name, item in table_features(schema).items() if isinstance(item, IdFeature)}
        self._tallies = {
            name: FrequencyCounter(None if feature.encoding == "vocabulary" else _COUNTED_VALUES)
            for name, feature in self._features.items()
        }
        self._num_rows = 0
        self._num_positive = 0.0

    def add(self, rows: NDArray[np.int64], columns: NamedColumns) -> None:
        """Add rows with their row numbers in the table."""
        schema = self._schema
        self._num_rows += len(columns)
        if columns.labels is not None:
            self._num_positive += float(columns.labels.sum())
        for name, moments in self._moments.items():
            moments.add(columns.numbers(schema.numeric[name].column or name))
        for name, sample in self._samples.items():
            sample.add(rows, common_precision(columns.numbers(schema.bucketed[name].column or name)))
        for name, keys in feature_keys(schema, columns):
            self._tallies[self._tables[name]].add(keys)

    def statistics(self, crossed: dict[str, CollisionStats] | None = None) -> FeatureStatistics:
        """The statistics of the rows so far."""
        words = {name: item for name, item in self._features.items() if item.encoding == "vocabulary"}
        hashed = {name: item for name, item in self._features.items() if item.encoding == "hash"}
        chosen = {name: self._tallies[name].by_frequency(item.min_count, item.max_size) for name, item in words.items()}
        return FeatureStatistics(
            num_rows=self._num_rows,
            moments={name: moments.result() for name, moments in self._moments.items()},
            edges={name: self._edges(name, feature) for name, feature in self._schema.bucketed.items()},
            vocabularies={name: tuple(keys.tolist()) for name, keys in chosen.items()},
            num_rare={name: len(self._tallies[name].keys) - len(keys) for name, keys in chosen.items()},
            collision_stats={
                name: _collision_stats(name, self._tallies[name], item.num_buckets) for name, item in hashed.items()
            }
            | (crossed or {}),
            positive_rate=None if self._schema.label is None else self._num_positive / self._num_rows,
        )

    def _edges(self, name: str, feature: BucketFeature) -> tuple[float, ...]:
        if feature.edges is not None:
            return feature.edges
        return tuple(_edges_of(self._samples[name].values, feature.num_buckets).tolist())


def _edges_of(values: NDArray[np.float64], num_ranges: int) -> NDArray[np.float64]:
    """Quantile edges: the lower edges of all ranges but the first. A value frequent enough to fill a range has one of
    its own; the remaining values share the other ranges evenly."""
    distinct, counts = np.unique(values, return_counts=True)
    alone, left = np.zeros(len(distinct), bool), num_ranges
    while (fills := ~alone & (counts * left > counts[~alone].sum())).any():
        alone |= fills
        left = num_ranges - int(alone.sum())
    shared = np.repeat(distinct[~alone], counts[~alone])
    edges = np.quantile(shared, np.arange(1, left) / left, method="higher") if len(shared) else shared
    begins = np.concatenate([edges, distinct[alone], distinct[1:][alone[:-1]]])
    # An edge at the smallest value would leave an empty range below it.
    return np.unique(begins[begins > distinct[0]]) if len(distinct) else begins


class _Moments:
    """Mean and standard deviation, chunk by chunk (Chan, Golub and LeVeque, 1979)."""

    def __init__(self, feature: NumericFeature) -> None:
        self._feature = feature
        self._count, self._num_missing = 0, 0
        self._mean, self._squares = 0.0, 0.0

    def add(self, raw: NDArray[np.float64]) -> None:
        self._num_missing += int(np.isnan(raw).sum())
        values = transform(raw, self._feature)
        values = values[~np.isnan(values)]
        if len(values) == 0:
            return
        # From the first value on, so that the mean of equal values is that value.
        mean, count = float(values[0] + (values - values[0]).mean()), self._count + len(values)
        shift = mean - self._mean
        self._squares += float(((values - mean) ** 2).sum()) + shift**2 * self._count * len(values) / count
        self._mean += shift * (len(values) / count)
        self._count = count

    def result(self) -> Moments:
        variance, epsilon = self._squares / max(self._count, 1), np.finfo(np.float64).eps
        # Values that are all the same differ from their mean by the rounding of their sum (the bound of scikit-learn).
        is_constant = variance <= self._count * epsilon * variance + (self._count * self._mean * epsilon) ** 2
        deviation = 0.0 if is_constant else math.sqrt(variance)
        return Moments(mean=self._mean, deviation=deviation, num_missing=self._num_missing)


class _Sample:
    """A sample of values: all rows, or those with a row-number hash divisible by a power of two."""

    def __init__(self) -> None:
        self.values = np.zeros(0)
        self._marks = np.zeros(0, np.uint64)
        self._scale = 1

    def add(self, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        there = ~np.isnan(values)
        self._marks = np.concatenate([self._marks, hash_array(rows[there].view(np.uint64), _SALT)])
        self.values = np.concatenate([self.values, values[there]])
        self._downsample()
        while len(self.values) > _QUANTILE_VALUES:
            self._scale *= 2
            self._downsample()

    def _downsample(self) -> None:
        kept = self._marks % np.uint64(self._scale) == 0
        self._marks, self.values = self._marks[kept], self.values[kept]


def _collision_stats(table: str, counter: FrequencyCounter, num_buckets: int) -> CollisionStats:
    """Collisions: counted, or expected for an estimated number of values."""
    if counter.scale == 1:
        _, sizes = np.unique(IdEncoding(table, num_buckets=num_buckets).ids(counter.keys), return_counts=True)
        colliding = int(sizes[sizes > 1].sum())
        return CollisionStats(num_values=len(counter.keys), num_colliding=colliding, num_buckets=num_buckets)
    num_values = len(counter.keys) * counter.scale
    alone = (1 - 1 / (num_buckets - 1)) ** (num_values - 1)
    colliding = round(num_values * (1 - alone))
    return CollisionStats(num_values=num_values, num_colliding=colliding, num_buckets=num_buckets, is_estimated=True)
