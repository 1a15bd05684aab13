"""What the features of a data set say of its columns: names of numbers, JSON, and nulls that Arrow fills in."""

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from kitforge.data.features import class_names, named, python_rows, schema_features, with_json, without_fills
from kitforge.data.source import open_rows
from kitforge.foundation.errors import DataError

NAMES = ["O", "B-PER", "I-PER"]
CLASS = datasets.ClassLabel(names=NAMES)


def written(dataset: datasets.Dataset, path: Path) -> Path:
    """The Parquet file of a dataset, with the metadata that the Hub serves."""
    parquet.write_table(dataset.data.table, path)
    return path


@pytest.mark.parametrize("feature", [CLASS, datasets.List(CLASS), datasets.LargeList(CLASS)])
def test_the_names_of_a_class_label_are_found_in_memory_and_in_a_file(feature: Any, tmp_path: Path) -> None:
    value = 2 if feature is CLASS else [0, 2]
    rows = datasets.Dataset.from_dict({"tags": [value]}, features=datasets.Features({"tags": feature}))
    for spec in (rows, rows.to_iterable_dataset(), rows.data.table, written(rows, tmp_path / "a.parquet")):
        (shard,) = open_rows(spec)
        column, names = class_names(shard.features, ("ner_tags", "tags"))
        assert (column, list(names)) == ("tags", NAMES)
        ((location, row),) = shard.rows()
        assert named(row["tags"], names, location) == ("I-PER" if feature is CLASS else ["O", "I-PER"])


def test_a_number_without_a_name_is_refused_and_one_of_no_class_is_kept() -> None:
    assert named([0, -100, "I-PER"], NAMES, "row 1") == ["O", -100, "I-PER"]
    with pytest.raises(DataError, match="row 1 has a label without a name"):
        named(3, NAMES, "row 1")


@pytest.mark.parametrize("metadata", [None, {}, {b"huggingface": b"{"}, {b"huggingface": b'{"info": []}'}])
def test_columns_of_which_nothing_is_said_have_no_names(metadata: Any) -> None:
    assert schema_features(metadata) == {}
    assert class_names({}, ("tags",)) == ("", ())


def test_json_in_a_column_of_a_file_is_read(tmp_path: Path) -> None:
    values = {"tools": [[{"a": None, "b": [1]}], []], "extra": [{"x": 1}, None]}
    features = datasets.Features({"tools": datasets.List(datasets.Json()), "extra": datasets.Json()})
    rows = datasets.Dataset.from_dict(values, features=features)
    (shard,) = open_rows(written(rows, tmp_path / "a.parquet"))
    assert [row for _, row in shard.rows()] == list(rows)
    assert with_json("text", {"_type": "Value"}) == "text"


def test_nulls_that_arrow_fills_in_are_left_out_at_every_depth_but_in_json() -> None:
    given = [{"a": None, "b": {"c": None, "d": [None, {"e": None}]}, "j": {"k": None}}]
    assert without_fills(given) == [{"b": {"d": [None, {}]}, "j": {}}]
    feature = datasets.Features({"x": [{"j": datasets.Json()}]}).to_dict()["x"]
    assert without_fills(given, feature) == [{"b": {"d": [None, {}]}, "j": {"k": None}}]
    assert pa.array(given).to_pylist() == given


def test_a_day_that_python_lacks_leaves_a_row_its_other_columns(tmp_path: Path) -> None:
    days = pa.array([0, -719163, 2932897], pa.int32()).cast(pa.date32())
    table = pa.table({"text": ["a", "b", "c"], "day": days})
    wanted = [("a", "1970-01-01"), ("b", "0000-12-31"), ("c", "10000-01-01")]
    assert [(row["text"], str(row["day"])) for row in python_rows(table)] == wanted
    parquet.write_table(table, tmp_path / "rows.parquet")
    for spec in (table, str(tmp_path / "rows.parquet")):
        (shard,) = open_rows(spec)
        assert [row["text"] for _, row in shard.rows()] == ["a", "b", "c"]
