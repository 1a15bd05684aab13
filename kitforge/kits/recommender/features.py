"""Feature encoding: rows of a table to the tensors of a model, the same in training, evaluation and serving."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.columns import ListValues, NamedColumns
from kitforge.data.tables.id_index import IdIndex
from kitforge.foundation.config import check, from_dict, to_dict
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.files import write_text
from kitforge.foundation.seed import key
from kitforge.foundation.untrusted import parse_json
from kitforge.kits.recommender.batch import FeatureBatch, IdBag, IdSequence
from kitforge.kits.recommender.schema import BucketFeature, CrossFeature, FeatureSchema, IdFeature, NumericFeature

FORMAT = 1
# Tables that are named where values share buckets.
_MAX_TABLES = 4
_FOLD = 0x9E3779B97F4A7C15
MISSING, UNKNOWN = 0, 1


class IdEncoding(Protocol):
    """The ids of one embedding table."""

    @property
    def num_ids(self) -> int | None:
        """One more than the largest id; None where any int64 may occur."""
        ...

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        ...

    @property
    def missing(self) -> int:
        """The id of what is missing."""
        ...


@final
class HashEncoding:
    """So many buckets, salted by the table's name; bucket 0 is for what is missing alone."""

    def __init__(self, table: str, num_buckets: int) -> None:
        self.num_ids: int | None = num_buckets
        self.missing = MISSING
        self._salt = key("ids", table)
        self._modulus = np.uint64(num_buckets - 1)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        return (hash_array(keys.view(np.uint64), self._salt) % self._modulus).astype(np.int64) + 1


@final
class VocabularyEncoding:
    """The keys seen in training, from id 2 on by falling frequency; 1 for every other."""

    def __init__(self, keys: NDArray[np.int64]) -> None:
        self.num_ids: int | None = len(keys) + 2
        self.missing = MISSING
        self._index = IdIndex(keys)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        positions = self._index.find(keys)
        return np.where(positions < 0, UNKNOWN, positions + 2)


@final
class ExactEncoding:
    """The key itself. What is missing has a key of its own, which no other is likely to have."""

    def __init__(self, table: str) -> None:
        self.num_ids: int | None = None
        self.missing = key("missing", table)

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The id of each key [n] that is there."""
        return keys.copy()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Of a numeric feature over the training rows, after its logarithm."""

    mean: float
    deviation: float  # 0 where all values are equal
    num_missing: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollisionStats:
    """How the distinct values of a hashed table share its buckets."""

    num_values: int  # distinct ones
    num_colliding: int  # that share a bucket with another
    num_buckets: int
    is_estimated: bool = False  # from a sample of the values, where there were too many to be counted

    def __str__(self) -> str:
        about = "about " if self.is_estimated else ""
        return f"{about}{self.num_colliding:,} of {self.num_values:,} values in {self.num_buckets:,} buckets"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """All of it, by feature or by table."""

    num_rows: int
    moments: dict[str, Moments] = field(default_factory=dict)
    edges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    vocabularies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by table: keys by falling frequency
    num_rare: dict[str, int] = field(default_factory=dict)  # by table: distinct values left out of the vocabulary
    collision_stats: dict[str, CollisionStats] = field(default_factory=dict)  # by table
    positive_rate: float | None = None  # share of labels that are 1

    def collisions(self) -> str | None:
        """The tables whose values share buckets, in words, those with the largest share of such values first."""
        crowded = [(name, each) for name, each in self.collision_stats.items() if each.num_colliding]
        crowded.sort(key=lambda item: -item[1].num_colliding / item[1].num_values)
        words = [f"{name} {each}" for name, each in crowded[:_MAX_TABLES]]
        left = len(crowded) - len(words)
        return "; ".join(words + ([f"fewer in {left} other tables"] if left else [])) or None


def save_features(path: Path, schema: FeatureSchema, statistics: FeatureStatistics) -> None:
    """Write schema and statistics to one JSON file, whole or not at all."""
    content = {"format": FORMAT, "schema": to_dict(schema), "statistics": to_dict(statistics)}
    write_text(path, json.dumps(content, separators=(",", ":")))


def load_features(path: Path) -> tuple[FeatureSchema, FeatureStatistics]:
    """What `save_features` wrote. Raises DataError for anything else."""
    try:
        content: Any = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the features {path}", got=error, fix="name a run of the recommender") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path} holds no features", got=f"format {got}", expected=f"format {FORMAT}")
    return from_dict(FeatureSchema, content["schema"], "schema"), from_dict(
        FeatureStatistics, content["statistics"], "statistics"
    )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """An embedding table that the features ask for."""

    name: str
    num_ids: int | None  # None: any int64
    dim: int | None  # None: the model's
    features: tuple[str, ...]


@final
class FeatureEncoder:
    """Turns columns into batches by a schema and the statistics of the training rows."""

    def __init__(self, schema: FeatureSchema, statistics: FeatureStatistics) -> None:
        self.schema = schema
        self.statistics = statistics
        self._spaces = {
            name: _space(name, item, statistics)
            for name, item in table_features(schema).items()
            if not isinstance(item, BucketFeature)
        }
        self._tables = feature_tables(schema)

    @property
    def fingerprint(self) -> str:
        """Equal for encoders that give equal batches."""
        return fingerprint_of("encoder", self.schema, self.statistics)

    @property
    def num_dense(self) -> int:
        """Width of the dense input."""
        return sum(1 + feature.indicator for feature in self.schema.numeric.values())

    def tables(self) -> list[TableSpec]:
        """The embedding tables, by the order of their first features."""
        return [
            TableSpec(
                name=name,
                num_ids=self._num_ranges(name) if isinstance(first, BucketFeature) else self._spaces[name].num_ids,
                dim=first.dim,
                features=tuple(feature for feature, table in self._tables.items() if table == name),
            )
            for name, first in table_features(self.schema).items()
        ]

    def encode(self, read: NamedColumns) -> FeatureBatch:
        """The features of rows, with labels where they were read."""
        schema = self.schema
        ids = {name: self._bucketed(name, feature, read) for name, feature in schema.bucketed.items()}
        for name, item in schema.categorical.items():
            keys, absent = read.keys(item.column or name)
            ids[name] = self._ids(name, keys, absent)
        for name, keys in self._cross_keys(read, ids).items():
            ids[name] = self._ids(name, keys, None)
        groups = None if schema.group is None else read.keys(schema.group)[0]
        return FeatureBatch(
            dense=torch.from_numpy(self._dense(read)),
            ids={name: torch.from_numpy(values) for name, values in ids.items()},
            bags={name: self._bag(name, read.lists(item.column or name)) for name, item in schema.bags.items()},
            sequences={
                name: self._sequence(name, read.lists(item.column or name), item.max_length)
                for name, item in schema.sequences.items()
            },
            labels=None if read.labels is None else torch.from_numpy(read.labels),
            groups=None if groups is None else torch.from_numpy(np.ascontiguousarray(groups)),
        )

    def ids_of(self, feature: str, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids [n] of keys [n] of a categorical feature, a bag or a sequence."""
        return self._ids(feature, keys, None)

    def cross_keys(self, read: NamedColumns) -> dict[str, NDArray[np.int64]]:
        """The 64-bit keys [n] of every cross, before they become ids."""
        ranges = {name: self._bucketed(name, feature, read) for name, feature in self.schema.bucketed.items()}
        return self._cross_keys(read, ranges)

    def _num_ranges(self, name: str) -> int:
        """The ranges of a bucketed feature, and the id of what is missing."""
        return len(self.statistics.edges[name]) + 2

    def _dense(self, read: NamedColumns) -> NDArray[np.float32]:
        dense = np.empty((len(read), self.num_dense), np.float32)
        column = 0
        for name, feature in self.schema.numeric.items():
            raw = read.numbers(feature.column or name)
            dense[:, column] = standardize(raw, feature, self.statistics.moments[name])
            column += 1
            if feature.indicator:
                dense[:, column] = np.isnan(raw)
                column += 1
        return dense

    def _bucketed(self, name: str, feature: BucketFeature, read: NamedColumns) -> NDArray[np.int64]:
        values = read.numbers(feature.column or name)
        buckets = np.searchsorted(np.array(self.statistics.edges[name]), values, side="right") + 1
        return np.where(np.isnan(values), 0, buckets)

    def _ids(self, name: str, keys: NDArray[np.int64], absent: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        space = self._spaces[self._tables[name]]
        ids = space.ids(keys)
        if absent is not None:
            ids[absent] = space.missing
        return ids

    def _cross_keys(self, read: NamedColumns, ranges: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        return {name: self._crossed(cross, read, ranges) for name, cross in self.schema.crosses.items()}

    def _crossed(
        self, cross: CrossFeature, read: NamedColumns, ranges: dict[str, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """One key for the values of several features, of their names and their order too."""
        state = np.full(len(read), key("cross", *cross.of), np.uint64)
        for part in cross.of:
            if part in self.schema.bucketed:
                mixed = ranges[part].view(np.uint64)
            else:
                keys, absent = read.keys(self.schema.categorical[part].column or part)
                mixed = np.where(absent, key("missing", part), keys).view(np.uint64)
            state = hash_array(state ^ hash_array(mixed, key("part", part)), _FOLD)
        return state.view(np.int64)

    def _bag(self, name: str, lists: ListValues) -> IdBag:
        ids = self._ids(name, lists.values, None)
        return IdBag(ids=torch.from_numpy(ids), offsets=torch.from_numpy(np.array(lists.offsets)))

    def _sequence(self, name: str, lists: ListValues, max_length: int) -> IdSequence:
        lengths = np.minimum(lists.lengths, max_length)
        positions = np.arange(max_length)
        is_there = positions < lengths[:, None]
        ids = np.zeros(is_there.shape, np.int64)
        values = lists.values[(lists.offsets[1:, None] - lengths[:, None] + positions)[is_there]]
        ids[is_there] = self._ids(name, values, None)
        return IdSequence(ids=torch.from_numpy(ids), lengths=torch.from_numpy(lengths))


def transform(raw: NDArray[np.float64], feature: NumericFeature) -> NDArray[np.float64]:
    """Values with zeros put in and the logarithm taken; what is to become the mean is still NaN."""
    values = np.nan_to_num(raw, nan=0.0) if feature.missing == "zero" else raw
    return np.sign(values) * np.log1p(np.abs(values)) if feature.log else values


def standardize(raw: NDArray[np.float64], feature: NumericFeature, moments: Moments) -> NDArray[np.float64]:
    """What the model sees of a number."""
    values = transform(raw, feature)
    if feature.missing == "mean":
        values = np.where(np.isnan(values), moments.mean, values)
    return (values - moments.mean) / (moments.deviation or 1.0) if feature.standardize else values


def feature_tables(schema: FeatureSchema) -> dict[str, str]:
    """The table of every feature that has ids, by the feature's name."""
    own = {name: name for name in (*schema.bucketed, *schema.crosses)}
    return own | {name: feature.table or name for name, feature in id_features(schema)}


def table_features(schema: FeatureSchema) -> dict[str, IdFeature | BucketFeature | CrossFeature]:
    """The first feature of every table, by the table's name. Features of one table must agree on its ids."""
    first: dict[str, IdFeature] = {}
    for name, feature in id_features(schema):
        present = first.setdefault(feature.table or name, feature)
        if _settings(present) != _settings(feature):
            raise ConfigError(
                f"the features of table {feature.table or name!r} disagree",
                got=f"{_settings(feature)} for {name!r}",
                expected=str(_settings(present)),
                fix="give them one kind, encoding, size and dim",
            )
    clash = [name for name in (*schema.bucketed, *schema.crosses) if name in first]
    check(not clash, "data.schema table", clash, "a name that no bucketed feature or cross has")
    return dict(schema.bucketed) | first | dict(schema.crosses)


def id_features(schema: FeatureSchema) -> Iterator[tuple[str, IdFeature]]:
    """Every feature whose values are keys, by name."""
    yield from schema.categorical.items()
    yield from schema.bags.items()
    yield from schema.sequences.items()


def _settings(feature: IdFeature) -> dict[str, object]:
    """Whatever decides which ids a table has."""
    names = ("kind", "encoding", "num_buckets", "min_count", "max_size", "dim")
    return {name: getattr(feature, name) for name in names}


def _space(table: str, feature: IdFeature | CrossFeature, statistics: FeatureStatistics) -> IdEncoding:
    if isinstance(feature, CrossFeature) or feature.encoding == "hash":
        return HashEncoding(table, feature.num_buckets)
    if feature.encoding == "vocabulary":
        return VocabularyEncoding(np.array(statistics.vocabularies[table], np.int64))
    return ExactEncoding(table)
