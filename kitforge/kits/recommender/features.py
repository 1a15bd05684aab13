"""Feature encoding: rows of a table to the tensors of a model, the same in training, evaluation and serving."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
# Tables that a message about collisions names.
_MAX_TABLES = 4
_FOLD = 0x9E3779B97F4A7C15
MISSING, UNKNOWN = 0, 1
_LARGEST = float(np.finfo(np.float32).max)


class IdEncoding:
    """Maps the 64-bit keys of one embedding table to ids.

    `num_buckets`: hashed, salted by the table's name; bucket 0 is for missing values. `vocabulary`: the keys seen in
    training have ids from 2 on by falling frequency, all others 1, missing values 0. Neither: the key itself; a missing
    value has a key of its own.
    """

    def __init__(
        self, table: str, *, num_buckets: int | None = None, vocabulary: NDArray[np.int64] | None = None
    ) -> None:
        self._salt, self._num_buckets = key("ids", table), num_buckets
        self._index = None if vocabulary is None else IdIndex(vocabulary)
        # One more than the largest id; None: any int64.
        self.num_ids = num_buckets if vocabulary is None else len(vocabulary) + 2
        self.missing = key("missing", table) if self.num_ids is None else MISSING

    def ids(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ids [n] of keys [n] of values that are present."""
        if self._index is not None:
            positions = self._index.find(keys)
            return np.where(positions < 0, UNKNOWN, positions + 2)
        if self._num_buckets is not None:
            buckets = hash_array(keys.view(np.uint64), self._salt) % np.uint64(self._num_buckets - 1)
            return buckets.astype(np.int64) + 1
        return keys.copy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Mean and standard deviation of a numeric feature over the training rows, after its logarithm."""

    mean: float
    deviation: float  # standard deviation; 0 if all values are equal
    num_missing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollisionStats:
    """Hash collisions of a table: how many distinct values share a bucket."""

    num_values: int  # distinct ones
    num_colliding: int  # that share a bucket with another
    num_buckets: int
    is_estimated: bool = False  # from a sample of the values, if there are too many to count

    def __str__(self) -> str:
        about = "about " if self.is_estimated else ""
        return f"{about}{self.num_colliding:,} of {self.num_values:,} values in {self.num_buckets:,} buckets"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStatistics:
    """Statistics of the training rows that the encoder needs, by feature or by table. Stored as JSON."""

    num_rows: int
    moments: dict[str, Moments] = field(default_factory=dict)
    edges: dict[str, tuple[float, ...]] = field(default_factory=dict)
    vocabularies: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by table: keys by falling frequency
    num_rare: dict[str, int] = field(default_factory=dict)  # by table: distinct values left out of the vocabulary
    collision_stats: dict[str, CollisionStats] = field(default_factory=dict)  # by table
    positive_rate: float | None = None  # share of labels that are 1

    def collisions(self) -> str | None:
        """A message about tables with hash collisions, the largest share of colliding values first."""
        crowded = [(name, each) for name, each in self.collision_stats.items() if each.num_colliding]
        crowded.sort(key=lambda item: -item[1].num_colliding / item[1].num_values)
        words = [f"{name} {each}" for name, each in crowded[:_MAX_TABLES]]
        left = len(crowded) - len(words)
        return "; ".join(words + ([f"fewer in {left} other tables"] if left else [])) or None


def save_features(path: Path, schema: FeatureSchema, statistics: FeatureStatistics) -> None:
    """Write schema and statistics to one JSON file, atomically."""
    content = {"format": FORMAT, "schema": to_dict(schema), "statistics": to_dict(statistics)}
    write_text(path, json.dumps(content, separators=(",", ":")))


def load_features(path: Path) -> tuple[FeatureSchema, FeatureStatistics]:
    """Read a file of `save_features`. Raises DataError for any other file."""
    try:
        content: Any = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the features {path}", got=error, fix="name a run of the recommender") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{path} holds no features", got=f"format {got}", expected=f"format {FORMAT}")
    schema = from_dict(FeatureSchema, content["schema"], "schema")
    return schema, from_dict(FeatureStatistics, content["statistics"], "statistics")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpec:
    """An embedding table of the features."""

    name: str
    num_ids: int | None  # None: any int64
    dim: int | None  # None: the model's
    features: tuple[str, ...]


class FeatureEncoder:
    """Encodes columns as batches of features, by a schema and the statistics of the training rows."""

    def __init__(self, schema: FeatureSchema, statistics: FeatureStatistics) -> None:
        self.schema = schema
        self.statistics = statistics
        self._encodings = {
            name: _encoding(name, item, statistics)
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
                num_ids=len(self.statistics.edges[name]) + 2
                if isinstance(first, BucketFeature)
                else self._encodings[name].num_ids,
                dim=first.dim,
                features=tuple(feature for feature, table in self._tables.items() if table == name),
            )
            for name, first in table_features(self.schema).items()
        ]

    def encode(self, read: NamedColumns) -> FeatureBatch:
        """The features of rows, with labels if they were read."""
        schema = self.schema
        ids = {name: self._bucketed(name, feature, read) for name, feature in schema.bucketed.items()}
        for name, category in schema.categorical.items():
            keys, absent = read.keys(category.column or name)
            ids[name] = self.ids_of(name, keys, absent)
        for name, keys in self.cross_keys(read, ids).items():
            ids[name] = self.ids_of(name, keys)
        bags = {}
        for name, item in schema.bags.items():
            lists = read.lists(item.column or name)
            values = torch.from_numpy(self.ids_of(name, lists.values))
            bags[name] = IdBag(ids=values, offsets=torch.from_numpy(np.array(lists.offsets)))
        groups = None if schema.group is None else read.keys(schema.group)[0]
        return FeatureBatch(
            dense=torch.from_numpy(self._dense(read)),
            ids={name: torch.from_numpy(values) for name, values in ids.items()},
            bags=bags,
            sequences={
                name: self._sequence(name, read.lists(item.column or name), item.max_length)
                for name, item in schema.sequences.items()
            },
            labels=None if read.labels is None else torch.from_numpy(read.labels),
            groups=None if groups is None else torch.from_numpy(np.ascontiguousarray(groups)),
        )

    def ids_of(
        self, feature: str, keys: NDArray[np.int64], absent: NDArray[np.bool_] | None = None
    ) -> NDArray[np.int64]:
        """The ids [n] of keys [n] of a feature; `absent` [n] marks missing values."""
        encoding = self._encodings[self._tables[feature]]
        ids = encoding.ids(keys)
        if absent is not None:
            ids[absent] = encoding.missing
        return ids

    def missing_id(self, feature: str) -> int:
        """The id of a missing value of a feature."""
        return self._encodings[self._tables[feature]].missing

    def cross_keys(
        self, read: NamedColumns, ranges: dict[str, NDArray[np.int64]] | None = None
    ) -> dict[str, NDArray[np.int64]]:
        """The 64-bit keys [n] of every cross, before they become ids. `ranges`: ids of the bucketed features."""
        if ranges is None:
            ranges = {name: self._bucketed(name, feature, read) for name, feature in self.schema.bucketed.items()}
        return {name: self._crossed(cross, read, ranges) for name, cross in self.schema.crosses.items()}

    def _dense(self, read: NamedColumns) -> NDArray[np.float32]:
        dense = np.empty((len(read), self.num_dense), np.float32)
        column = 0
        for name, feature in self.schema.numeric.items():
            raw = read.numbers(feature.column or name)
            values = standardize(raw, feature, self.statistics.moments[name])
            if np.abs(values).max(initial=0.0) > _LARGEST:
                raise DataError(
                    f"feature {name!r} has a value that float32 cannot hold once it is standardized",
                    got=f"{raw[np.argmax(np.abs(values))]:g}, standard deviation "
                    f"{self.statistics.moments[name].deviation:g}",
                    expected="values like those of training",
                    fix=f"repair the value, or train with data.schema.numeric.{name}.log=true",
                )
            dense[:, column] = values
            column += 1
            if feature.indicator:
                dense[:, column] = np.isnan(raw)
                column += 1
        return dense

    def _bucketed(self, name: str, feature: BucketFeature, read: NamedColumns) -> NDArray[np.int64]:
        values = common_precision(read.numbers(feature.column or name))
        buckets = np.searchsorted(common_precision(np.array(self.statistics.edges[name])), values, side="right") + 1
        return np.where(np.isnan(values), 0, buckets)

    def _crossed(
        self, cross: CrossFeature, read: NamedColumns, ranges: dict[str, NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """One key per row from the values, names and order of several features."""
        state = np.full(len(read), key("cross", *cross.of), np.uint64)
        for part in cross.of:
            if part in self.schema.bucketed:
                mixed = ranges[part].view(np.uint64)
            else:
                keys, absent = read.keys(self.schema.categorical[part].column or part)
                mixed = np.where(absent, key("missing", part), keys).view(np.uint64)
            state = hash_array(state ^ hash_array(mixed, key("part", part)), _FOLD)
        return state.view(np.int64)

    def _sequence(self, name: str, lists: ListValues, max_length: int) -> IdSequence:
        lengths = np.minimum(lists.lengths, max_length)
        positions = np.arange(max_length)
        is_there = positions < lengths[:, None]
        ids = np.zeros(is_there.shape, np.int64)
        values = lists.values[(lists.offsets[1:, None] - lengths[:, None] + positions)[is_there]]
        ids[is_there] = self.ids_of(name, values)
        return IdSequence(ids=torch.from_numpy(ids), lengths=torch.from_numpy(lengths))


def common_precision(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Numbers as float32 holds them, so that 0.7 is one number in a file of texts and in a column of float32. Whole
    numbers that float64 holds stay, such as dates that are written as 20261127."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32).astype(np.float64)
    return np.where((values == np.rint(values)) & (np.abs(values) < 2.0**53), values, rounded)


def transform(raw: NDArray[np.float64], feature: NumericFeature) -> NDArray[np.float64]:
    """Values with `missing=zero` and the logarithm applied. Missing values that become the mean are still NaN."""
    values = np.nan_to_num(raw, nan=0.0) if feature.missing == "zero" else raw
    return np.sign(values) * np.log1p(np.abs(values)) if feature.log else values


def standardize(raw: NDArray[np.float64], feature: NumericFeature, moments: Moments) -> NDArray[np.float64]:
    """The dense input of a numeric feature."""
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
    settings = ("kind", "encoding", "num_buckets", "min_count", "max_size", "dim")
    for name, feature in id_features(schema):
        present = first.setdefault(feature.table or name, feature)
        own, others = ({option: getattr(each, option) for option in settings} for each in (feature, present))
        if own != others:
            raise ConfigError(
                f"the features of table {feature.table or name!r} disagree",
                got=f"{own} for {name!r}",
                expected=str(others),
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


def feature_keys(schema: FeatureSchema, columns: NamedColumns) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """The keys of the values that are there, of every feature whose values are keys."""
    for name, feature in id_features(schema):
        if name in schema.categorical:
            keys, absent = columns.keys(feature.column or name)
            yield name, keys[~absent]
        else:
            yield name, columns.lists(feature.column or name).values


def _encoding(table: str, feature: IdFeature | CrossFeature, statistics: FeatureStatistics) -> IdEncoding:
    if isinstance(feature, CrossFeature) or feature.encoding == "hash":
        return IdEncoding(table, num_buckets=feature.num_buckets)
    if feature.encoding == "vocabulary":
        return IdEncoding(table, vocabulary=np.array(statistics.vocabularies[table], np.int64))
    return IdEncoding(table)
