"""Tables in memory by columns, and the cells that stand for no value."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, ListColumn, concatenate
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import TableSourceConfig, open_table
from kitforge.foundation.errors import ConfigError, DataError

COLUMNS: dict[str, Any] = {
    "price": np.array([1.5, 2.5, np.nan]),
    "user": np.array([7, 8, 9]),
    "city": ["a", "NA", "b"],
    "seen": [[1, 2], [], [3]],
}
ROWS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
LAYOUT = ColumnLayout(
    numbers=("price",),
    keys=(KeyColumn(name="user", kind="integer"), KeyColumn(name="city")),
    lists=(ListColumn(name="seen", kind="integer"),),
)


class Frame:
    """As another library gives its columns: texts as views."""

    def __init__(self) -> None:
        self._table = pyarrow.table(COLUMNS)
        city = self._table.column("city").cast(pyarrow.string_view())
        self._table = self._table.set_column(2, "city", city)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self._table.__arrow_c_stream__(requested_schema)


def columns_of(spec: object, config: TableSourceConfig | None = None) -> Columns:
    return concatenate(list(read_columns(open_table(spec, config or TableSourceConfig()), LAYOUT, BadRows())))


def test_texts_as_views_are_read_as_rows_are() -> None:
    # Columns in other containers are those of the drawn tables of tests/differential/test_tables.py.
    assert set(open_table(Frame()).names) == set(COLUMNS)
    expected, found = columns_of(ROWS), columns_of(Frame())
    np.testing.assert_array_equal(found.numbers, expected.numbers)
    np.testing.assert_array_equal(found.keys, expected.keys)
    np.testing.assert_array_equal(found.lists["seen"].values, expected.lists["seen"].values)


def test_texts_that_stand_for_no_value_do_so_in_every_source() -> None:
    for spec in (ROWS, COLUMNS, pandas.DataFrame(COLUMNS)):
        assert columns_of(spec, TableSourceConfig(missing_values=("NA",))).absent[:, 1].tolist() == [False, True, False]


def test_what_is_no_table_is_refused_in_its_own_words() -> None:
    with pytest.raises(DataError, match=r"one row[^$]*single value for user[^$]*list of rows"):
        open_table({"user": 7, "seen": [1, 2]})
    with pytest.raises(DataError, match=r"no table"):
        open_table({"a": [1, 2], "b": [1]})
    with pytest.raises(DataError, match=r"there are no rows"):
        open_table(pandas.DataFrame({"a": []}))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_of_a_csv_file_is_found_out(tmp_path: Path, delimiter: str) -> None:
    lines = [delimiter.join(cells) for cells in (("click", '"a, b; c"', "x"), ("1", "2,5", "3"))]
    (tmp_path / "a.csv").write_text("\n".join(lines).replace("2,5", '"2,5"') + "\n")
    source = open_table(tmp_path / "a.csv")
    assert source.names == ("click", "a, b; c", "x")
    (chunk,) = [job() for job in source.jobs(source.names)]
    assert chunk.table.to_pylist() == [{"click": "1", "a, b; c": "2,5", "x": "3"}]


def test_a_delimiter_that_is_named_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b:c,d\n")
    assert open_table(tmp_path / "a.csv", TableSourceConfig(delimiter=":")).names == ("a,b", "c,d")
    with pytest.raises(ConfigError, match=r"data\.delimiter"):
        TableSourceConfig(delimiter="::")


def test_a_cell_that_is_no_number_says_how_to_read_it_as_missing(tmp_path: Path) -> None:
    for odd in ("NA", "inf", "\\N"):
        (tmp_path / "a.csv").write_text(f"price\n1.5\n{odd}\n")
        layout = ColumnLayout(numbers=("price",))
        with pytest.raises(DataError) as error:
            list(read_columns(open_table(tmp_path / "a.csv"), layout, BadRows()))
        assert f"data.missing_values='[\"{odd}\"]'" in str(error.value)
        told = open_table(tmp_path / "a.csv", TableSourceConfig(missing_values=(odd,)))
        assert np.isnan(concatenate(list(read_columns(told, layout, BadRows()))).numbers[1, 0])


def test_a_cell_that_no_column_holds_is_a_bad_row_of_a_frame() -> None:
    frame = pandas.DataFrame({"city": pandas.Series(["a", "\ud83d", "b"], dtype=object), "price": [1.0, 2.0, 3.0]})
    layout = ColumnLayout(numbers=("price",), keys=(KeyColumn(name="city"),))
    for spec in (frame, dict(frame.items())):
        bad = BadRows(policy="skip")
        assert concatenate(list(read_columns(open_table(spec), layout, bad))).numbers.tolist() == [[1], [3]]
        assert bad.total == 1
        with pytest.raises(DataError, match="row 2 of the data holds no text in column 'city'"):
            list(read_columns(open_table(spec), layout, BadRows()))


def test_categories_whose_words_are_views_are_read_as_polars_has_them() -> None:
    words = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0, 1, None], pyarrow.uint32()), pyarrow.array(["a", "b"], pyarrow.string_view())
    )
    lists = pyarrow.ListArray.from_arrays(pyarrow.array([0, 2, 2, 3]), words)
    table = pyarrow.table({"city": words, "seen": lists.slice(0, 3)})
    layout = ColumnLayout(keys=(KeyColumn(name="city"),), lists=(ListColumn(name="seen"),))
    bad = BadRows(policy="skip")
    found = concatenate(list(read_columns(open_table(table), layout, bad)))
    plain = [{"city": "a", "seen": ["a", "b"]}, {"city": "b", "seen": []}]
    wanted = concatenate(list(read_columns(open_table(plain), layout, BadRows())))
    assert found.keys.tolist() == wanted.keys.tolist()
    assert found.lists["seen"].values.tolist() == wanted.lists["seen"].values.tolist()
    # The third row has a list of nothing but a missing word.
    assert bad.total == 1
