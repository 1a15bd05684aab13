"""Parquet, interactions, rows in Python; which files a spec names, and what is said about those that are none."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from kitforge.data.tables import json_files, parquet_files, python_rows
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, LabelColumn, ListColumn
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError
from tests.data.tables.reading_rows import DATA, columns_of, equal
from tests.text_keys import hash_text

LAYOUT = ColumnLayout(
    numbers=("price",),
    keys=(KeyColumn(name="site"), KeyColumn(name="user", kind="integer")),
    lists=(ListColumn(name="tags", kind="integer"),),
    label=LabelColumn(name="click"),
)
ROWS: list[dict[str, Any]] = [
    {"click": number % 2, "price": None if number == 3 else number / 2, "site": f"s{number % 3}", "user": number - 5}
    | {"tags": [number] * (number % 4)}
    for number in range(10)
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=3)
    return tmp_path / "a.parquet"


def test_parquet_and_rows_in_python_are_the_same_table(path: Path) -> None:
    found = columns_of(path, LAYOUT)
    assert found.keys.tolist() == [[hash_text(row["site"]), row["user"]] for row in ROWS]
    assert np.flatnonzero(np.isnan(found.numbers[:, 0])).tolist() == [3]
    assert found.lists["tags"].values.tolist() == [item for row in ROWS for item in row["tags"]]
    assert equal(found, columns_of(ROWS, LAYOUT))
    assert equal(found, columns_of(iter(ROWS), LAYOUT))


def test_a_dataset_is_the_same_table_too(path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    assert equal(columns_of(dataset, LAYOUT), columns_of(path, LAYOUT))
    chosen = columns_of(dataset.select([7, 2]), LAYOUT)
    assert chosen.keys[:, 1].tolist() == [2, -3]


def test_a_text_that_is_stored_by_a_dictionary_has_the_same_keys(tmp_path: Path, path: Path) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    coded = table.set_column(table.schema.get_field_index("site"), "site", table["site"].dictionary_encode())
    parquet.write_table(coded, tmp_path / "b.parquet")
    assert parquet.ParquetFile(tmp_path / "b.parquet").schema_arrow.field("site").type != pyarrow.string()
    assert equal(columns_of(tmp_path / "b.parquet", LAYOUT), columns_of(path, LAYOUT))


def test_a_large_row_group_is_read_in_parts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = columns_of(path, LAYOUT)
    monkeypatch.setattr(parquet_files, "_GROUP_BYTES", 0)
    monkeypatch.setattr(parquet_files, "_PART_ROWS", 2)
    assert equal(columns_of(path, LAYOUT), whole)


@pytest.mark.parametrize(
    ("kind", "values", "wanted"),
    [
        (pyarrow.float64(), [1.0, None, 3.0], [1, 0, 3]),
        (pyarrow.uint64(), [1, None, 3], [1, 0, 3]),
        (pyarrow.bool_(), [True, None, False], [1, 0, 0]),
        (pyarrow.string(), ["1", None, "3"], [1, 0, 3]),
        (pyarrow.binary(), [b"1", None, b"3"], [1, 0, 3]),
        (pyarrow.null(), [None, None, None], [0, 0, 0]),
    ],
)
def test_integer_keys_come_from_many_types(kind: pyarrow.DataType, values: list[object], wanted: list[int]) -> None:
    table = pyarrow.table({"id": pyarrow.array(values, kind)})
    found = columns_of(table.to_pylist(), ColumnLayout(keys=(KeyColumn(name="id", kind="integer"),)))
    assert found.keys[:, 0].tolist() == wanted


def test_an_integer_and_its_text_have_one_key_as_text() -> None:
    layout = ColumnLayout(keys=(KeyColumn(name="id"),))
    assert columns_of([{"id": 7}, {"id": "7"}], layout).keys[:, 0].tolist() == [hash_text("7")] * 2
    assert columns_of([{"id": 7}], layout).keys[0, 0] == hash_text("7")


@pytest.mark.parametrize("kind", ["text", "integer"])
@pytest.mark.parametrize("is_coded", [False, True])
def test_an_empty_text_is_no_value_in_any_format(tmp_path: Path, kind: Any, is_coded: bool) -> None:
    texts = pyarrow.array(["1", "", None, "1"])
    parquet.write_table(pyarrow.table({"id": texts.dictionary_encode() if is_coded else texts}), tmp_path / "a.parquet")
    layout = ColumnLayout(numbers=("id",), keys=(KeyColumn(name="id", kind=kind),))
    for spec in (tmp_path / "a.parquet", [{"id": text} for text in ("1", "", None, "1")]):
        found = columns_of(spec, layout)
        assert found.absent[:, 0].tolist() == [False, True, True, False]
        assert np.isnan(found.numbers[:, 0]).tolist() == [False, True, True, False]
        assert found.keys[0, 0] == found.keys[3, 0] != found.keys[1, 0] == found.keys[2, 0] == 0


@pytest.mark.parametrize(
    ("kind", "value"), [(pyarrow.uint64(), 2**63), (pyarrow.string(), "x"), (pyarrow.string(), str(2**63))]
)
def test_a_parquet_row_is_named_by_its_number(tmp_path: Path, kind: pyarrow.DataType, value: object) -> None:
    parquet.write_table(pyarrow.table({"id": pyarrow.array([None] * 4 + [value], kind)}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 5, holds no 64-bit id in column 'id'"):
        columns_of(tmp_path / "a.parquet", ColumnLayout(keys=(KeyColumn(name="id", kind="integer"),)))


@pytest.mark.parametrize(
    ("layout", "values"),
    [
        (ColumnLayout(numbers=("x",)), [[1]]),
        (ColumnLayout(keys=(KeyColumn(name="x"),)), [{"a": 1}]),
        (ColumnLayout(keys=(KeyColumn(name="x"),)), [[1]]),
        (ColumnLayout(lists=(ListColumn(name="x"),)), [1]),
    ],
)
def test_a_column_of_the_wrong_type_is_refused(layout: ColumnLayout, values: list[object]) -> None:
    with pytest.raises(DataError, match=r"(?s)column 'x' is of a type that cannot be used so.*expected"):
        columns_of([{"x": value} for value in values], layout)


def test_a_parquet_of_another_schema_names_the_nearest_column(tmp_path: Path, path: Path) -> None:
    other = pyarrow.Table.from_pylist(ROWS).rename_columns(["click", "prices", "site", "user", "tags"])
    parquet.write_table(other, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"(?s)b\.parquet has no column 'price'.*did you mean 'prices'"):
        columns_of([path, tmp_path / "b.parquet"], LAYOUT)


@pytest.mark.parametrize("raw", [b"", b"PAR1 not a table PAR1"])
def test_what_is_no_parquet_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(raw)
    with pytest.raises(DataError, match=r"(?s)cannot read .*a\.parquet.*a whole Parquet file"):
        columns_of(tmp_path / "a.parquet", LAYOUT)


def test_a_damaged_row_group_is_refused(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[4:300] = bytes(296)
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet"):
        columns_of(path, LAYOUT)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROWS[0] | {"site": object()}, "row 11 of the data holds a cell that cannot be read in column 'site'"),
        (ROWS[0] | {"tags": ["\ud83d"]}, "row 11 of the data holds no text in column 'tags'"),
        ("text", "row 11 of the data is not a row"),
        (ROWS[0] | {"user": 2**80}, "row 11 of the data holds no 64-bit id"),
        (ROWS[0] | {"price": "dear"}, "row 11 of the data holds no number"),
        (ROWS[0] | {"tags": [1, None]}, "row 11 of the data has no value in column 'tags'"),
    ],
)
def test_a_bad_row_in_python_is_named_by_its_number(row: object, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_rows, "_CHUNK_ROWS", 4)
    with pytest.raises(DataError, match=message):
        columns_of([*ROWS, row], LAYOUT)
    bad = BadRows(policy="skip")
    assert equal(columns_of([*ROWS, row], LAYOUT, bad), columns_of(ROWS, LAYOUT))
    assert bad.total == 1


@pytest.mark.parametrize("spec", [None, 3, b"raw"])
def test_what_is_no_table_is_refused(spec: object) -> None:
    with pytest.raises(DataError, match="this is not a table"):
        open_table(spec)


@pytest.mark.parametrize("rows", [[], iter([]), [3]])
def test_no_rows_are_refused(rows: object) -> None:
    with pytest.raises(DataError, match="these are no rows of a table"):
        open_table(rows)


def test_an_endless_source_is_read_no_further_than_is_asked() -> None:
    taken = 0

    def rows() -> Iterator[dict[str, int]]:
        nonlocal taken
        while True:
            taken += 1
            yield {"x": taken}

    parts = read_columns(open_table(rows()), ColumnLayout(numbers=("x",)), BadRows(), num_workers=2)
    first = next(parts)
    assert first.numbers[:3, 0].tolist() == [1, 2, 3]
    parts.close()  # type: ignore[attr-defined]
    assert taken == len(first)


def test_an_interaction_log_has_a_row_a_user(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3 10\n3 11\n\n1 12\n-2 13\n-2 14\n-2 10\n")
    layout = ColumnLayout(
        keys=(KeyColumn(name="user", kind="integer"),), lists=(ListColumn(name="items", kind="integer"),)
    )
    found = columns_of(tmp_path / "a.txt", layout)
    assert found.keys[:, 0].tolist() == [3, 1, -2]
    assert found.lists["items"].values.tolist() == [10, 11, 12, 13, 14, 10]
    assert found.lists["items"].lengths.tolist() == [2, 1, 3]


def test_small_blocks_cut_no_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(user, item) for user in range(20) for item in range(user % 7 + 1)]
    (tmp_path / "a.txt").write_text("".join(f"{user}\t{item}\n" for user, item in pairs))
    layout = ColumnLayout(lists=(ListColumn(name="items", kind="integer"),))
    whole = columns_of(tmp_path / "a.txt", layout)
    monkeypatch.setattr("kitforge.data.file_bytes._BLOCK_BYTES", 25)
    assert equal(columns_of(tmp_path / "a.txt", layout), whole)
    assert whole.lists["items"].lengths.tolist() == [user % 7 + 1 for user in range(20)]


@pytest.mark.parametrize("size", [8, 2**20])
def test_a_user_in_two_places_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("kitforge.data.file_bytes._BLOCK_BYTES", size)
    (tmp_path / "a.txt").write_text("1 10\n2 11\n3 11\n1 12\n")
    with pytest.raises(DataError, match=r"(?s)has user 1 in two places.*sort"):
        columns_of(tmp_path / "a.txt", ColumnLayout(keys=(KeyColumn(name="user", kind="integer"),)))


def test_a_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 10\n1 x\n2\n")
    layout = ColumnLayout(keys=(KeyColumn(name="user", kind="integer"),))
    with pytest.raises(DataError, match=r"a\.txt:3 has the wrong number of cells"):
        columns_of(tmp_path / "a.txt", layout)
    bad = BadRows(policy="skip")
    assert len(columns_of(tmp_path / "a.txt", layout, bad)) == 1
    assert bad.total == 2


def test_folders_patterns_and_lists_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.csv", "a.csv", "sub/c.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"x,y\n{ord(name[-5])},1\n")
    layout = ColumnLayout(numbers=("x",))
    assert columns_of(tmp_path, layout).numbers[:, 0].tolist() == [97, 98, 99]
    assert columns_of(str(tmp_path / "?.csv"), layout).numbers[:, 0].tolist() == [97, 98]
    assert columns_of([tmp_path / "b.csv", tmp_path / "sub"], layout).numbers[:, 0].tolist() == [98, 99]


def test_folders_name_columns_and_names_with_an_underscore_are_no_part_of_the_table(tmp_path: Path) -> None:
    for name in ("city=a%20b/day=1/x.csv", "city=c/day=2/x.csv", "city=__HIVE_DEFAULT_PARTITION__/day=2/x.csv"):
        (tmp_path / "parts" / name).parent.mkdir(parents=True)
        (tmp_path / "parts" / name).write_text("x,day\n5,9\n" if "c/day" in name else "x\n5\n")
    for name in ("_temporary/0/x.csv", "_delta_log/1.csv", ".x.csv", "_x.csv", "a/_y.csv"):
        (tmp_path / "parts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "parts" / name).write_text("x\n5\n")
    layout = ColumnLayout(keys=(KeyColumn(name="city"), KeyColumn(name="day", kind="integer")))
    for spec in (tmp_path / "parts", *(str(tmp_path / f"parts/{each}.csv") for each in ("*/day=*/*", "**/*"))):
        found = columns_of(spec, layout)
        # A column of the file goes before that of a folder.
        assert found.keys[:, 1].tolist() == [2, 1, 9]
        assert found.keys[:, 0].tolist() == [0, hash_text("a b"), hash_text("c")]
        assert found.absent[:, 0].tolist() == [True, False, False]
    for spec in ("_delta*/*.csv", "_temporary/**/x.csv", "_x.csv", "*/_y.csv", "_[x].csv"):
        assert open_table(str(tmp_path / "parts" / spec)).names == ("x",)
    with pytest.raises(DataError, match="begins with _ in the pattern"):
        open_table(str(tmp_path / "parts/*_log/*.csv"))
    # Of what lies above nothing is said.
    assert open_table(tmp_path / "parts/city=c/day=2").names == ("x", "day")
    assert open_table(tmp_path / "parts/city=a%20b").names == ("x", "day")


def test_an_empty_part_is_left_out_with_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.csv").write_text("")
    (tmp_path / "b.csv").write_text("x,y\n1,2\n")
    assert columns_of(tmp_path, ColumnLayout(numbers=("x",))).numbers.tolist() == [[1]]
    assert "a.csv is empty and left out" in caplog.text
    (tmp_path / "b.csv").write_text("")
    with pytest.raises(DataError, match="is empty"):
        open_table(tmp_path)


def test_a_column_that_the_first_row_lacks_is_there_in_rows_and_json_lines(tmp_path: Path) -> None:
    rows = [{"x": 1}, {"y": "b", "x": 2}, {"z": 3}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:1]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    layout = ColumnLayout(numbers=("x", "z"), keys=(KeyColumn(name="y"),))
    for spec in (rows, [*rows, {"\ud83d": 3}], tmp_path):
        assert open_table(spec).names == ("x", "y", "z")
    assert columns_of([{1: 2, "x": 3}], ColumnLayout(numbers=("1", "x"))).numbers.tolist() == [[2, 3]]
    for spec in (rows, tmp_path):
        found = columns_of(spec, layout)
        assert np.array_equal(found.numbers, [[1, np.nan], [2, np.nan], [np.nan, 3]], equal_nan=True)
        assert found.absent[:, 0].tolist() == [True, False, True]


def test_json_lines_are_searched_for_columns_once_and_only_where_these_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"x": 1, "y": {}}, {"z": 2}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parsed, columns_of_rows = list[object](), json_files.columns_of_rows
    monkeypatch.setattr(
        json_files, "columns_of_rows", lambda rows: columns_of_rows(parsed.append(row) or row for row in rows)
    )
    assert open_table(tmp_path / "a.jsonl").fingerprint and not parsed
    assert {open_table(tmp_path / "a.jsonl").names for _ in range(3)} == {("x", "y", "z")}
    assert parsed == rows


def test_the_row_numbers_of_pandas_are_no_column_but_where_they_are_named(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"x": [1, 2]}, index=[4, 3])
    frame.to_parquet(tmp_path / "a.parquet")
    for spec in (frame, tmp_path / "a.parquet"):
        assert open_table(spec).names == ("x",)
        assert columns_of(spec, ColumnLayout(numbers=("__index_level_0__",))).numbers.tolist() == [[4], [3]]
    frame.rename_axis("user").to_parquet(tmp_path / "a.parquet")
    assert open_table(tmp_path / "a.parquet").names == ("x", "user")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("clicks.csvv", r"(?s)does not exist.*did you mean .*clicks.csv"),
        ("*.tsv", "no file matches"),
        ("none/a.csv", "does not exist"),
        ("notes.md", r"(?s)of no format that is known.*data\.format"),
        ("prose.txt", r"(?s)of no format that is known.*a first line 'a text'"),
        ("folder", "holds no readable files"),
    ],
)
def test_a_spec_that_names_no_table_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "clicks.csv").write_text("a,b\n1,2\n")
    (tmp_path / "notes.md").write_text("notes")
    (tmp_path / "prose.txt").write_text("a text\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=message):
        open_table(str(tmp_path / name))


@pytest.mark.parametrize("header", ["a,a", "a,1.5", "a,"])
def test_what_is_no_header_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,2\n")
    with pytest.raises(DataError, match="is not a header"):
        open_table(tmp_path / "a.csv")


CRITEO = ColumnLayout(
    numbers=tuple(f"I{place}" for place in range(1, 14)),
    keys=tuple(KeyColumn(name=f"C{place}") for place in range(1, 27)),
    label=LabelColumn(name="label"),
)


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
@pytest.mark.parametrize(
    ("name", "layout", "num_rows", "positive"),
    [
        ("criteo_kaggle_10k/train.tsv.gz", CRITEO, 8000, 0.216),
        ("criteo_1tb_1k/rows.tsv.gz", CRITEO, 1000, 0.021),
        (
            "avazu_9k/train.csv.gz",
            ColumnLayout(keys=(KeyColumn(name="id"),), label=LabelColumn(name="click")),
            6295,
            0.173,
        ),
        ("adult_income/test.csv.gz", ColumnLayout(label=LabelColumn(name="income", positive=">50K")), 8000, 0.233125),
    ],
)
def test_real_logs_are_read_whole(name: str, layout: ColumnLayout, num_rows: int, positive: float) -> None:
    found = columns_of(DATA / name, layout)
    assert len(found) == num_rows
    assert found.labels is not None and found.labels.mean() == pytest.approx(positive, abs=1e-3)


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
def test_a_real_interaction_log_has_all_its_users_and_items() -> None:
    layout = ColumnLayout(lists=(ListColumn(name="items", kind="integer"),))
    found = columns_of(DATA / "amazon_video/interactions.txt.gz", layout)
    assert (len(found), len(found.lists["items"].values)) == (31013, 281242)


@pytest.mark.skipif(not DATA.exists(), reason="the data sets are not here")
def test_ids_of_a_real_log_that_are_beyond_int64_are_named() -> None:
    with pytest.raises(DataError, match=r"(?s)train\.csv\.gz:2 holds no 64-bit id.*11222333684130851894.*kind: text"):
        columns_of(DATA / "avazu_9k/train.csv.gz", ColumnLayout(keys=(KeyColumn(name="id", kind="integer"),)))
