"""One value has one key, whatever container brings it and whatever stands beside it."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest
import torch
from pyarrow import parquet

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import ColumnLayout, Columns, KeyColumn, LabelColumn, ListColumn
from kitforge.data.tables.row_stream import RowStream
from kitforge.data.tables.source import TableSourceConfig, open_table
from kitforge.foundation.errors import DataError
from tests.data.tables.reading_rows import columns_of
from tests.differential.drawn import WHOLE
from tests.text_keys import hash_text

TEXT = ColumnLayout(keys=(KeyColumn(name="c"),))
INTEGER = ColumnLayout(keys=(KeyColumn(name="c", kind="integer"),))
NUMBER = ColumnLayout(numbers=("c",))

# Spellings of one value.
TRUE = (True, np.bool_(True), "True", "true", "TRUE", " true ")
TWELVE = (12, 12.0, np.float32(12), np.int16(12), "12", "12.0", " 12", "12.00 ", Decimal(12), Decimal("12.00"))
LARGE = (2**60, 2.0**60, str(2**60), "1.152921504606847e+18", Decimal(2**60))
HALF = (3.5, np.float32(3.5), "3.5", " 3.5", Decimal("3.5"))
SMALL = (Decimal("0.00000012"), Decimal("1.2E-7"), "0.00000012", "1.2E-7")
ZERO = (0, 0.0, "0", "0.000000000", "0E-9", Decimal("0E-9"), Decimal("0.00"))
WORD = ("a b", " a b", "a b\t", b"a b")
NOTHING = (None, float("nan"), "", "  ", pandas.NA, pandas.NaT, np.float64("nan"))
SPELLINGS = (TRUE, TWELVE, LARGE, HALF, SMALL, ZERO, WORD)
NEIGHBOURS: tuple[list[Any], ...] = ([], ["x"], [None], [7], [0.5], [True], [float("nan")], [Decimal("0.125")], [2**63])


def in_rows(values: Sequence[Any], _: Path) -> Any:
    return [{"c": value} for value in values]


def in_object_frame(values: Sequence[Any], _: Path) -> Any:
    return pandas.DataFrame({"c": pandas.Series(list(values), dtype=object)})


def in_frame(values: Sequence[Any], _: Path) -> Any:
    return pandas.DataFrame({"c": list(values)})


def in_categories(values: Sequence[Any], _: Path) -> Any:
    return pandas.DataFrame({"c": pandas.Categorical(list(values))})


def in_arrays(values: Sequence[Any], _: Path) -> Any:
    return {"c": list(values)}


def in_json(values: Sequence[Any], folder: Path) -> Any:
    def plain(value: Any) -> Any:
        if value is None or value is pandas.NA or value is pandas.NaT or (isinstance(value, float) and np.isnan(value)):
            return None
        value = value.item() if isinstance(value, np.generic) else value
        value = value.decode() if isinstance(value, bytes) else value
        return str(value) if isinstance(value, Decimal) else value

    path = folder / "c.jsonl"
    path.write_text("".join(json.dumps({"c": plain(value)}) + "\n" for value in values))
    return path


def in_csv(values: Sequence[Any], folder: Path) -> Any:
    path = folder / "c.csv"
    plain = [value.decode() if isinstance(value, bytes) else value for value in values]
    # A second column, since a line without a cell is no row.
    pandas.DataFrame({"c": pandas.Series(plain, dtype=object), "d": 0}).to_csv(path, index=False)
    return path


def in_parquet(values: Sequence[Any], folder: Path) -> Any:
    try:
        array = pyarrow.array(list(values), from_pandas=True)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, OverflowError):
        pytest.skip("a column of Parquet has one type")
    parquet.write_table(pyarrow.table({"c": array}), folder / "c.parquet")
    return folder / "c.parquet"


CONTAINERS = (in_rows, in_object_frame, in_frame, in_categories, in_arrays, in_json, in_csv, in_parquet)
Container = Callable[[Sequence[Any], Path], Any]


def key_of(value: Any, layout: ColumnLayout = TEXT) -> int:
    return int(columns_of([{"c": value}], layout).keys[0, 0])


def read(spec: Any, layout: ColumnLayout) -> Columns:
    return columns_of(spec, layout)


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda each: each.__name__[3:])
@pytest.mark.parametrize("spellings", SPELLINGS, ids=["true", "twelve", "large", "half", "small", "zero", "word"])
def test_a_value_has_one_key_in_every_container(container: Container, spellings: Any, tmp_path: Path) -> None:
    wanted = key_of(spellings[0])
    for value in spellings:
        if container is in_categories and isinstance(value, bytes):
            continue
        found = read(container([value], tmp_path), TEXT)
        assert found.keys[:, 0].tolist() == [wanted], value


@pytest.mark.prove
@pytest.mark.parametrize("neighbours", NEIGHBOURS, ids=str)
@pytest.mark.parametrize(
    "container", (in_rows, in_object_frame, in_arrays, in_json, in_csv), ids=lambda c: c.__name__[3:]
)
def test_a_value_has_one_key_beside_any_other(container: Container, neighbours: list[Any], tmp_path: Path) -> None:
    for spellings in SPELLINGS:
        wanted = key_of(spellings[0])
        for number, value in enumerate(spellings):
            ways = ((0, [value, *neighbours]), (-1, [*neighbours, value]))
            # In the gate by turns before the others and behind them.
            for row, order in ways if WHOLE else ways[number % 2 :][:1]:
                found = read(container(order, tmp_path), TEXT)
                assert found.keys[row, 0] == wanted, order


@pytest.mark.parametrize("blank", [" ", "\t", "\xa0", "\u1680", "\u2003", "\u202f", "\u205f", "\u3000"], ids=ascii)
def test_every_blank_of_unicode_on_either_side_is_no_part_of_a_text(blank: str) -> None:
    for text in (f"{blank}12.0", f"12.0{blank}", f"{blank}Tür", f"名{blank}"):
        assert key_of(text) == key_of(text.strip()), ascii(text)


@pytest.mark.parametrize("neighbours", ([], ["x"], [7.5], [True], ["2"]), ids=str)
@pytest.mark.parametrize(
    "container", (in_rows, in_object_frame, in_json, in_csv, in_arrays), ids=lambda c: c.__name__[3:]
)
def test_no_value_is_no_value_in_every_spelling(container: Container, neighbours: list[Any], tmp_path: Path) -> None:
    for value in NOTHING:
        found = read(container([value, *neighbours], tmp_path), TEXT)
        assert found.absent[:, 0].tolist() == [True] + [False] * len(neighbours), value


def test_columns_of_whole_numbers_have_the_same_keys_with_and_without_a_null(tmp_path: Path) -> None:
    wanted = [key_of(1), key_of(2)]
    for values in ([1, 2], [1, 2, None], [1.0, 2.0, float("nan")], ["1", "2", ""], [1, 2, "x"], [1, 2.0, None]):
        for container in (in_rows, in_object_frame, in_frame, in_csv, in_json):
            assert read(container(values, tmp_path), TEXT).keys[:2, 0].tolist() == wanted, (values, container)


def test_whole_number_keys_are_read_from_every_spelling(tmp_path: Path) -> None:
    for container in (in_rows, in_object_frame, in_json, in_csv):
        for value in (*TWELVE, "+12", "012"):
            assert read(container([value, 5], tmp_path), INTEGER).keys[:, 0].tolist() == [12, 5], value
        for value in TRUE:
            assert read(container([value], tmp_path), INTEGER).keys[:, 0].tolist() == [1], value


@pytest.mark.parametrize("value", (12.5, "12.5", "x", 2.0**70, 2**64, Decimal("1.5")), ids=str)
@pytest.mark.parametrize("neighbours", ([], [7], ["y"]), ids=str)
def test_a_cell_that_is_no_whole_number_is_a_bad_row_beside_any_other(value: Any, neighbours: list[Any]) -> None:
    bad = BadRows(policy="skip")
    good = columns_of([{"c": 3}, {"c": value}, *({"c": each} for each in neighbours)], INTEGER, bad)
    assert good.keys[0, 0] == 3 and bad.total >= 1 and "holds no 64-bit id in column 'c'" in bad.counts


def test_texts_that_only_look_alike_keep_keys_of_their_own() -> None:
    for one, other in (("007", "7"), ("1.10", "1.1"), ("12e3", "12000"), ("a", "A"), ("1_2", "12"), ("nan", "")):
        assert key_of(one) != key_of(other)


def test_numbers_are_read_from_every_spelling(tmp_path: Path) -> None:
    spellings = {
        12.0: TWELVE,
        1.0: TRUE,
        3.5: (*HALF, "3,5"),
        1250.25: ("1250,25", "1,250.25", "1.250,25"),
        -0.5: ("-0,5",),
    }
    for container in (in_rows, in_object_frame, in_json, in_csv):
        for wanted, values in spellings.items():
            for value in values:
                for neighbours in ([], [2.0], ["2"], [None]):
                    found = read(container([value, *neighbours], tmp_path), NUMBER)
                    assert found.numbers[0, 0] == wanted, (value, neighbours)


def test_a_comma_before_three_digits_is_decided_by_the_option_or_the_file(tmp_path: Path) -> None:
    rows = [{"c": "1,250"}]
    with pytest.raises(DataError, match=r"(?s)1,250.*data\.decimal"):
        columns_of(rows, NUMBER)
    assert columns_of(rows, NUMBER, decimal=",").numbers[0, 0] == 1.25
    assert columns_of(rows, NUMBER, decimal=".").numbers[0, 0] == 1250
    (tmp_path / "a.csv").write_text("c;d\n1,250;1\n12,5;2\n7;3\n")
    assert columns_of(tmp_path / "a.csv", NUMBER).numbers[:, 0].tolist() == [1.25, 12.5, 7]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (("12,5", "1.250", "-2.000", "1.250,75", "1.234.567"), (12.5, 1250, -2000, 1250.75, 1234567)),
        (("12,5", "0.250", "12.5", "7"), (12.5, 0.25, 12.5, 7)),
        # Without a decimal comma in the file a point is the decimal one.
        (("7.4", "1.001", "12.500"), (7.4, 1.001, 12.5)),
    ],
)
def test_points_are_between_thousands_where_the_file_shows_decimal_commas(
    cells: tuple[str, ...], values: tuple[float, ...], tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_text("".join(["c;d\n", *(f"{cell};a\n" for cell in cells)]))
    assert columns_of(tmp_path / "a.csv", NUMBER).numbers[:, 0].tolist() == list(values)


def test_narrow_floats_and_decimals_have_the_digits_of_the_data_beside_any_others() -> None:
    for value, text in ((np.float32(0.1), "0.1"), (np.float32(1000000.5), "1000000.5"), (Decimal("1.10"), "1.10")):
        for neighbours in ([], [0.5], ["x"], [np.float32(7)], [Decimal("0.125")]):
            assert read(in_rows([value, *neighbours], Path()), TEXT).keys[0, 0] == hash_text(text), neighbours


def test_tensors_and_arrays_are_their_numbers() -> None:
    keyed, listed = INTEGER, ColumnLayout(lists=(ListColumn(name="c", kind="integer"),))
    whole = (torch.tensor([3, 4]), np.array([3, 4]), [torch.tensor(3), np.array(4)], [torch.tensor(3), 4])
    for column in whole:
        for spec in ({"c": column}, [{"c": cell} for cell in column]):
            assert read(spec, keyed).keys[:, 0].tolist() == [3, 4]
    for column in (
        torch.tensor([[1, 2], [3, 4]]),
        [torch.tensor([1, 2]), np.array([3, 4])],
        [[torch.tensor(1), 2], [3, 4]],
    ):
        for spec in ({"c": column}, [{"c": cell} for cell in column]):
            assert read(spec, listed).lists["c"].values.tolist() == [1, 2, 3, 4]
    halves = torch.tensor([0.5, 2.0])
    for column in (halves.clone().requires_grad_(), halves.bfloat16(), [*halves], [*halves.bfloat16()]):
        assert read({"c": column}, NUMBER).numbers[:, 0].tolist() == [0.5, 2]
    stream = RowStream(iter([{"c": torch.tensor(7)}]), TEXT, CellRules())
    stream.read(1, BadRows())
    assert json.loads(stream.state()["rows"]) == [{"c": 7}]


def test_lists_are_read_as_csv_writers_have_them(tmp_path: Path) -> None:
    cells = ["[1, 2]", "['1' '2']", '["1", "2"]', "1 2", "[]", "[1 2\n 3]", "[1]x"]
    pandas.DataFrame({"c": cells, "d": 0}).to_csv(tmp_path / "c.csv", index=False)
    lists = columns_of(tmp_path / "c.csv", ColumnLayout(lists=(ListColumn(name="c", separator=" "),))).lists["c"]
    assert lists.lengths.tolist() == [2, 2, 2, 2, 0, 3, 1]
    assert lists.values.tolist() == [*([hash_text("1"), hash_text("2")] * 4), *map(hash_text, ["1", "2", "3", "[1]x"])]
    views = pyarrow.array([[1, 2], None, [], [3]], pyarrow.list_view(pyarrow.int64()))
    for column in (
        views,
        pyarrow.array(views.to_pylist(), pyarrow.large_list_view(pyarrow.int64())),
        pyarrow.chunked_array([views, views[2:]]),
    ):
        rows = columns_of(pyarrow.table({"c": column}), ColumnLayout(lists=(ListColumn(name="c", kind="integer"),)))
        assert rows.lists["c"].values.tolist()[:3] == [1, 2, 3]
        assert rows.lists["c"].lengths.tolist()[:4] == [2, 0, 0, 1]


def test_labels_are_read_from_every_spelling(tmp_path: Path) -> None:
    label = ColumnLayout(numbers=("d",), label=LabelColumn(name="c"))
    ones, zeros = (
        (1, 1.0, "1", "1.0", " 1", True, "True", "true", "TRUE"),
        (0, 0.0, "0", "0.0", False, "False", "false"),
    )
    for one, zero in ((one, zero) for one in ones for zero in zeros):
        assert columns_of([{"c": one, "d": 0}, {"c": zero, "d": 0}], label).labels.tolist() == [1, 0]  # type: ignore[union-attr]
    chosen = ColumnLayout(numbers=("d",), label=LabelColumn(name="c", positive="2", negative="1.0"))
    for two, one in ((2, 1), (2.0, 1.0), ("2", "1"), (" 2", "1.0")):
        assert columns_of([{"c": two, "d": 0}, {"c": one, "d": 0}], chosen).labels.tolist() == [1, 0]  # type: ignore[union-attr]


def test_items_of_lists_have_the_keys_of_single_values() -> None:
    layout = ColumnLayout(lists=(ListColumn(name="c"),))
    rows = [{"c": each} for each in (["1", "2"], [1, 2], [1.0, 2.0], "1 2", (1, "2"), np.array([1, 2]), [2, True])]
    wanted = [key_of(1), key_of(2)]
    for order in (rows, rows[::-1], *([row] for row in rows[:-1])):
        found = columns_of(order, layout).lists["c"]
        lists = [
            found.values[start:stop].tolist() for start, stop in zip(found.offsets, found.offsets[1:], strict=False)
        ]
        for row, keys in zip(order, lists, strict=True):
            assert keys == ([key_of(2), key_of(True)] if row is rows[-1] else wanted)


def test_a_stream_reads_cells_as_a_table_does() -> None:
    values = [12.0, " 12", True, float("nan"), "?", "x"]

    def rows() -> Iterator[dict[str, Any]]:
        yield from ({"c": value} for value in values)

    rules = CellRules(missing_values=("?",))
    columns = RowStream(rows(), TEXT, rules).read(6, BadRows())
    table = columns_of([{"c": value} for value in values], TEXT, missing_values=("?",))
    assert columns is not None and columns.keys.tolist() == table.keys.tolist()
    assert columns.absent[:, 0].tolist() == table.absent[:, 0].tolist() == [False] * 3 + [True] * 2 + [False]


@pytest.mark.parametrize("values", ([-1, 5], [-1.0, 5.0], ["-1", "5"], [" -1", "5"], [-1, "5"]), ids=str)
def test_a_missing_value_is_one_in_columns_of_any_type(values: list[Any], tmp_path: Path) -> None:
    for container in (in_rows, in_object_frame, in_frame, in_categories, in_json, in_csv):
        spec = container(values, tmp_path)
        for layout in (TEXT, INTEGER):
            assert columns_of(spec, layout, missing_values=("-1",)).absent[:, 0].tolist() == [True, False]
        assert np.isnan(columns_of(spec, NUMBER, missing_values=("-1",)).numbers[:, 0]).tolist() == [True, False]


def test_dates_as_categories_are_refused_in_words_that_help() -> None:
    with pytest.raises(DataError, match="'c'.*of a type"):
        columns_of([{"c": date(2026, 1, 2)}], TEXT)


def test_missing_values_are_checked_when_a_table_is_opened() -> None:
    assert open_table([{"c": 1}], TableSourceConfig(missing_values=("?",))).cells.missing_values == ("?",)
