"""Documents that the caller hands over as Python objects: any iterable of rows, or a datasets.Dataset."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from kitforge.data.document_shard import SHARD_BYTES, EncodingErrors, documents_of, fingerprint_of, missing_column
from kitforge.data.features import Features, python_rows, schema_features
from kitforge.data.optional_imports import import_optional
from kitforge.foundation.errors import DataError

_DATASET_ROWS = 20_000
_MEMORY_ROWS = 1_000
# A mapping with these keys alone has parts of a data set, and no columns.
_SPLITS = frozenset({"train", "test", "validation", "valid", "val", "dev", "eval"})


@dataclass(frozen=True, kw_only=True)
class InMemoryShard:
    """Documents held in memory."""

    texts: tuple[str, ...]
    size: int

    @cached_property
    def fingerprint(self) -> str:
        """Of the texts."""
        return fingerprint_of("memory", *self.texts)

    def documents(self) -> Iterator[str]:
        """The texts as they are."""
        return iter(self.texts)


class InMemoryRows:
    """Rows held in memory, from the one with number `start` on."""

    def __init__(self, items: list[object], start: int, features: Features = None) -> None:
        self._items = items
        self._start = start
        self.features = features

    @cached_property
    def fingerprint(self) -> str:
        """Of what the rows look like."""
        return fingerprint_of("memory rows", *map(repr, self._items))

    @cached_property
    def size(self) -> int:
        """Characters of what the rows look like."""
        return sum(len(repr(row)) for row in self._items)

    def rows(self) -> Iterator[tuple[object, Any]]:
        """The rows as they are."""
        return ((f"row {number} of the data", row) for number, row in enumerate(self._items, start=self._start))


@dataclass(frozen=True, slots=True, kw_only=True)
class HFDatasetShard:
    """A range of the rows of a datasets.Dataset, from the one with number `start` on, or the documents of a column."""

    items: Any
    start: int
    column: str | None = None
    encoding_errors: EncodingErrors = "strict"

    @property
    def fingerprint(self) -> str:
        """The one that the dataset carries, with the options that affect reading."""
        own, start = self.items._fingerprint, self.start
        if self.column is None:
            return fingerprint_of("dataset rows", own, start, len(self.items))
        return fingerprint_of("dataset", own, start - 1, self.size, self.column, self.encoding_errors)

    @property
    def features(self) -> Features:
        """Those of the dataset."""
        return dict(self.items.features.to_dict())

    @property
    def size(self) -> int:
        """Bytes of the range, as the dataset's own tables count them."""
        return int(self.items.data.nbytes)

    def rows(self) -> Iterator[tuple[object, Any]]:
        """The rows as mappings."""
        return ((f"row {number} of the data", row) for number, row in enumerate(self.items, start=self.start))

    def documents(self) -> Iterator[str]:
        """The column's texts, the empty ones left out."""
        column = str(self.column)
        values = (value for batch in self.items.iter(batch_size=1000) for value in batch[column])
        rows = ((f"the dataset's row {at}", {column: value}) for at, value in enumerate(values, start=self.start))
        return documents_of(rows, column, self.encoding_errors)


def memory_rows(rows: Iterable[object]) -> Iterator[InMemoryRows]:
    """Read an iterable once, shard by shard: also an IterableDataset, and a table by `table_rows`."""
    found: Any = getattr(rows, "features", None)
    # A stream of datasets may not know its own.
    features = dict(found.to_dict()) if hasattr(found, "to_dict") else found if isinstance(rows, TableRows) else None
    source, start = iter(rows), 1
    while items := list(islice(source, _MEMORY_ROWS)):
        yield InMemoryRows(items, start, features)
        start += len(items)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRows:
    """The rows of a table: of a DataFrame of pandas, or of Arrow's columns, as polars has them too."""

    items: list[dict[str, Any]]
    features: Features

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.items)


def rows_of_table(spec: object) -> object:
    """The rows of a table, or of a mapping from column to list, where it is one; else what was given."""
    if isinstance(spec, Mapping) and not _SPLITS.issuperset(spec) and all(map(_is_column, spec.values())):
        # Numbers of an array or a tensor as Python has them; an image stays an array.
        columns = {name: each.tolist() if getattr(each, "ndim", 0) == 1 else each for name, each in spec.items()}
        if len({len(values) for values in columns.values()}) > 1:
            got = ", ".join(f"{name}: {len(values)}" for name, values in columns.items())
            raise DataError("the columns are not equally long", got=got, expected="one length", fix="null is None")
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    # A Series has no columns, and a datasets.Dataset reads its own.
    is_table = hasattr(spec, "columns") or hasattr(spec, "column_names")
    table: Any = spec
    if not is_table or isinstance(spec, Mapping) or is_dataset(spec):
        return spec
    if hasattr(spec, "iloc"):
        # As in Parquet files, a missing value is null.
        return TableRows(items=table.astype(object).where(table.notna(), None).to_dict("records"), features=None)
    if hasattr(spec, "__arrow_c_stream__"):
        arrow = import_optional("pyarrow", needed_for="reading tables", extra="transformers")
        table = arrow.table(spec)
        return TableRows(items=python_rows(table), features=schema_features(table.schema.metadata))
    return spec


def _is_column(values: object) -> bool:
    return isinstance(values, (list, tuple)) or getattr(values, "ndim", 0) > 0


def dataset_shards(dataset: Any, column: str | None = None, errors: EncodingErrors = "strict") -> list[HFDatasetShard]:
    """Ranges of a dataset's rows, or of the documents of a column: DataError when it lacks the column or has no
    rows."""
    if column is not None:
        if column not in dataset.column_names:
            raise missing_column(column, dataset.column_names, "the dataset")
        if len(dataset) == 0:
            raise DataError("the dataset is empty", got="no rows", expected="at least one")
        dataset = dataset.select_columns([column])
    ranges = (range(at, min(at + _DATASET_ROWS, len(dataset))) for at in range(0, len(dataset), _DATASET_ROWS))
    return [
        HFDatasetShard(items=dataset.select(each), start=each.start + 1, column=column, encoding_errors=errors)
        for each in ranges
    ]


def memory_shards(rows: Iterable[object], column: str, errors: EncodingErrors) -> Iterator[InMemoryShard]:
    """Read an iterable once, to its end, and keep its documents."""
    texts: list[str] = []
    size = 0
    for text in documents_of(((f"row {at} of the data", row) for at, row in enumerate(rows, start=1)), column, errors):
        texts.append(text)
        size += len(text)
        if size >= SHARD_BYTES:
            yield InMemoryShard(texts=tuple(texts), size=size)
            texts, size = [], 0
    if texts:
        yield InMemoryShard(texts=tuple(texts), size=size)


def is_dataset(spec: object) -> bool:
    """Whether it is a datasets.Dataset, without importing the package: an instance implies that it is imported."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(spec, datasets.Dataset)
