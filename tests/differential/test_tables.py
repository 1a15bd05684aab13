"""Tables of every container against pandas and pyarrow: the same columns, and of every cell the same value and key."""

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.columns import ColumnLayout, KeyColumn, KeyKind, ListColumn, NamedColumns, concatenate
from kitforge.data.tables.hashing import hash_texts
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import TableSourceConfig, open_table
from kitforge.data.tables.split import split_rows
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.data.tables.times import Times, with_times
from kitforge.foundation.errors import DataError, KitforgeError
from tests.differential.drawn import drawn

ROW = "row"  # a number that is never missing, for a line without a cell is no row
INTEGERS = {f"{sign}int{bits}": getattr(pa, f"{sign}int{bits}")() for sign in ("", "u") for bits in (8, 16, 32, 64)}
WORDS = st.text(string.ascii_letters + "äß,;\t\"'|日 ", min_size=1, max_size=12).filter(
    lambda text: text.strip() and text.strip().lower() not in ("true", "false", "nan")
)
MOMENTS = st.datetimes(datetime(1950, 1, 1), datetime(2150, 1, 1))
# What pandas or pyarrow read, and this package refuses.
REFUSED: Mapping[str, tuple[Callable[[Path], Any], str]] = {
    "a column that a later file lacks": (
        lambda folder: [written(folder / "a.csv", "x,y\n1,2\n"), written(folder / "b.csv", "x\n3\n")],
        "has no column 'y'",
    ),
    "an object without a text": (lambda _: [{"x": 1, "y": object()}], "holds a cell that cannot be read"),
    "half a pair of surrogates": (lambda _: [{"x": 1, "y": "\ud83d"}], "holds no text"),
}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A table, and how its rows lie in memory."""

    table: Any
    index: str
    is_sparse: bool
    is_reversed: bool

    @property
    def frame(self) -> Any:
        """The table in pandas, with whole numbers and bools that may be missing."""
        kinds = {kind: getattr(pandas, f"{name.replace('int', 'Int').replace('uI', 'UI')}Dtype")()
                 for name, kind in INTEGERS.items()}  # fmt: skip
        frame = self.table.to_pandas(types_mapper={**kinds, pa.bool_(): pandas.BooleanDtype()}.get)
        if self.index == "shuffled":
            return frame.set_axis(np.arange(len(frame))[::-1] * 3)
        return frame.set_index(ROW) if self.index == "named" else frame

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The table as mappings; floats are as wide as in their column."""
        names = self.table.column_names[:: -1 if self.is_reversed else 1]
        columns = {name: list(values_of(self.table.column(name))) for name in names}
        rows = [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]
        return [{name: cell for name, cell in row.items() if not (self.is_sparse and cell is None)} for row in rows]


def values_of(column: Any) -> Sequence[Any]:
    is_narrow = pa.types.is_float32(column.type)
    return [np.float32(value) if is_narrow and value is not None else value for value in column.to_pylist()]


def plain(value: Any) -> Any:
    return float(str(value)) if isinstance(value, np.floating) else str(value)


@st.composite
def columns(draw: st.DrawFn, count: int) -> Any:
    kind = draw(
        st.sampled_from([*INTEGERS, "float32", "float64", "bool", "str", "category", "decimal", "ints", "words"])
    )
    values: Any
    width: Any
    if kind in INTEGERS:
        info = np.iinfo(kind)
        values, of = st.integers(int(info.min), int(info.max)) | st.integers(0, 9), INTEGERS[kind]
    elif kind.startswith("float"):
        # Beyond 2^24 csv writers write another whole number than the narrow float is.
        width, largest = (32, 2.0**24) if kind == "float32" else (64, 2.0**99)
        values = st.floats(width=width, allow_nan=False, allow_infinity=False, min_value=-largest, max_value=largest)
        values, of = values | st.sampled_from([0.5, -0.0, 12.0, 0.25]), pa.float32() if width == 32 else pa.float64()
    else:
        lists = partial(st.lists, max_size=3)
        values, of = {
            "bool": (st.booleans(), pa.bool_()),
            "str": (WORDS, pa.string()),
            "category": (WORDS, pa.dictionary(pa.int32(), pa.string())),
            "decimal": (st.decimals(-999, 999, places=2).map(lambda value: value + 0), pa.decimal128(6, 2)),
            "ints": (lists(st.integers(-(2**62), 2**62)), pa.list_(pa.int64())),
            "words": (lists(st.sampled_from(["a", "b c", "d'e", 'f"g', "h, i", "ü"])), pa.list_(pa.string())),
        }[kind]
    missing = st.none() if draw(st.booleans()) else st.nothing()
    return pa.array(draw(st.lists(values | missing, min_size=count, max_size=count)), of)


@st.composite
def tables(draw: st.DrawFn) -> Drawn:
    count = draw(st.integers(1, 4))
    named = {f"c{number}": draw(columns(count)) for number in range(draw(st.integers(1, 4)))}
    table = pa.table({ROW: np.arange(count), **named})
    index = draw(st.sampled_from(["range", "shuffled", "named"]))
    return Drawn(table=table, index=index, is_sparse=draw(st.booleans()), is_reversed=draw(st.booleans()))


def in_text(drawn_table: Drawn, folder: Path, name: str, **how: Any) -> Path:
    frame = drawn_table.frame.reset_index() if drawn_table.index == "named" else drawn_table.frame
    frame.to_csv(folder / name, index=False, **how)
    return folder / name


def in_json(table: Drawn, folder: Path) -> Path:
    lines = [json.dumps(row, default=plain) + "\n" for row in table.rows]
    return written(folder / "a.jsonl", "".join(lines))


def in_parquet(table: Drawn, folder: Path) -> Path:
    table.frame.to_parquet(folder / "a.parquet")
    return folder / "a.parquet"


def in_arrows_parquet(table: Drawn, folder: Path) -> Path:
    parquet.write_table(table.table, folder / "b.parquet")
    return folder / "b.parquet"


def in_folders(table: Drawn, folder: Path) -> Path:
    # Of a column of texts the folders are made, where there is one.
    names = [name for name in table.table.column_names[1:] if pa.types.is_string(table.table.column(name).type)]
    parquet.write_to_dataset(table.table, folder / "parts", partition_cols=names[:1])
    (folder / "parts/_temporary").mkdir()
    parquet.write_table(table.table, folder / "parts/_temporary/a.parquet")
    return folder / "parts"


def in_polars(table: Drawn, _: Path) -> Any:
    return pytest.importorskip("polars").from_arrow(table.table)


CONTAINERS: Mapping[str, Callable[[Drawn, Path], Any]] = {
    "arrow": lambda table, _: table.table,
    "frame": lambda table, _: table.frame,
    "rows": lambda table, _: table.rows,
    "columns": lambda table, _: {name: values_of(table.table.column(name)) for name in table.table.column_names},
    "jsonl": in_json,
    "csv": lambda table, folder: in_text(table, folder, "a.csv"),
    "decimal comma": lambda table, folder: in_text(table, folder, "b.csv", sep=";", decimal=","),
    "tsv": lambda table, folder: in_text(table, folder, "a.tsv", sep="\t"),
    "parquet of pandas": in_parquet,
    "parquet of pyarrow": in_arrows_parquet,
    "folders": in_folders,
    "polars": in_polars,
}


def form(given: Any) -> str | None:
    """What a cell says, written down independently: the text whose hash is its key."""
    value: Any = given
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, np.float32):
        value = float(str(value))
    if isinstance(value, (float, Decimal)) and float(value).is_integer():
        return str(int(value)) if abs(float(value)) < 2**63 else str(value)
    return str(value).strip()


def key(value: Any) -> int:
    return 0 if form(value) is None else int(hash_texts(pa.array([form(value)]))[0])


def number(value: Any) -> float:
    return np.nan if value is None else float(value)


def read(spec: Any, layout: ColumnLayout) -> NamedColumns:
    rows = concatenate(list(read_columns(open_table(spec), layout, BadRows(), num_workers=1)))
    return NamedColumns(rows, layout)


@pytest.mark.parametrize("container", CONTAINERS)
@drawn(25, whole=300)
@given(table=tables())
def test_every_container_gives_the_columns_and_cells_of_the_table(
    container: str, table: Drawn, tmp_path_factory: pytest.TempPathFactory
) -> None:
    spec = CONTAINERS[container](table, tmp_path_factory.mktemp("table"))
    all_columns = {name: table.table.column(name) for name in table.table.column_names}
    there = {name for name, column in all_columns.items() if column.null_count < len(column)}
    names = open_table(spec).names
    # A column that no row has is in none of the sparse rows.
    assert there <= set(names) <= set(all_columns) and len(names) == len(set(names))
    scalars = [name for name in there - {ROW} if not pa.types.is_list(all_columns[name].type)]
    lists = sorted(there - {ROW, *scalars})
    is_number = {name: not isinstance(all_columns[name].drop_null()[0].as_py(), str) for name in scalars}
    numbers = [name for name in scalars if is_number[name]]
    # A decimal comma is read in numbers alone.
    floats = [name for name in numbers if pa.types.is_floating(all_columns[name].type)]
    keys = [name for name in scalars if container != "decimal comma" or name not in floats]
    layout = ColumnLayout(
        numbers=(ROW, *numbers),
        keys=tuple(KeyColumn(name=name) for name in keys),
        lists=tuple(ListColumn(name=name) for name in lists),
    )
    found = read(spec, layout)
    order = found.numbers(ROW).astype(int)
    assert sorted(order) == list(range(table.table.num_rows))
    for name in numbers:
        wanted = [number(value) for value in all_columns[name].to_pylist()]
        # A narrow float in its shortest digits is read as the wide one of these digits.
        got = found.numbers(name)
        kind = np.float32 if pa.types.is_float32(all_columns[name].type) else np.float64
        assert np.array_equal(got.astype(kind), np.array(wanted, kind)[order], equal_nan=True), name
    for name in keys:
        got_keys, absent = found.keys(name)
        values = [values_of(all_columns[name])[row] for row in order]
        assert absent.tolist() == [form(value) is None for value in values], name
        assert got_keys.tolist() == [key(value) for value in values], (name, values)
    for name in lists:
        items = [all_columns[name].to_pylist()[row] or [] for row in order]
        assert found.lists(name).lengths.tolist() == list(map(len, items)), name
        assert found.lists(name).values.tolist() == [key(value) for each in items for value in each], name


@st.composite
def spellings_of_a_time(draw: st.DrawFn) -> str:
    moment, digits = draw(MOMENTS), draw(st.integers(0, 6))
    moment = moment.replace(microsecond=moment.microsecond // 10 ** (6 - digits) * 10 ** (6 - digits))
    fraction = f".{moment.microsecond:06}"[: digits + 1] if digits else ""
    zone = draw(st.sampled_from(["", "Z", "+00:00", "+02:00", "-11:30", "+0530"]))
    return f"{moment:%Y-%m-%d}{draw(st.sampled_from('T '))}{moment:%H:%M:%S}{fraction}{zone}"


@drawn(150)
@given(text=spellings_of_a_time(), other=spellings_of_a_time() | st.sampled_from(["7", "0.5"]), typed=st.booleans())
def test_a_time_is_the_same_in_every_spelling_and_beside_any_other(text: str, other: str, typed: bool) -> None:
    moment = datetime.fromisoformat(text)
    moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    whole, micros = since // timedelta(seconds=1), since % timedelta(seconds=1) // timedelta(microseconds=1)
    layout = with_times(ColumnLayout(), "t")
    values: list[Any] = [text]
    if typed:
        values = [moment, moment.astimezone(timezone(timedelta(hours=3)))]
    for column in ([*values], [text, other]):
        source = replace(open_table({"t": column}), times=("t",))
        found = Times.of(
            NamedColumns(concatenate(list(read_columns(source, layout, BadRows(), num_workers=1))), layout), "t"
        )
        assert (found.whole[0], found.fraction[0]) == (whole, micros / 1e6), column


NUMBERS = st.integers(-(10**12), 10**12).map(Decimal) | st.decimals(-(10**6), 10**6, places=3).map(
    lambda each: each + 0
)


def spellings_of(value: Decimal) -> list[Any]:
    text = format(value, "f")
    whole, _, decimals = text.partition(".")
    sign, digits = ("-", whole[1:]) if whole.startswith("-") else ("", whole)
    comma = f"{whole},{decimals or '0'}"
    spelled = [
        text, f" {text}\t", f"{whole}.{decimals}00", f"{value:e}", f"{sign}00{digits}.{decimals or 0}", value,
        float(value), np.float64(value), np.array(float(value)), torch.tensor(float(value), dtype=torch.float64),
        f"{sign}{int(digits):,}.{decimals or 0}",
    ]  # fmt: skip
    return [*spelled, *([] if len(decimals) == 3 else [comma])]


@drawn(60)
@given(value=NUMBERS, beside=st.sampled_from([None, 1, 0.5, "x", "1e2", "7", True, Decimal("0.125")]))
def test_a_number_is_the_same_in_every_spelling_and_beside_any_other(value: Decimal, beside: Any) -> None:
    layout = ColumnLayout(numbers=("c",))
    for spelling in spellings_of(value):
        for cells in ([spelling], [spelling, beside]):
            rows = [{"c": cell} for cell in cells]
            bad = BadRows(policy="skip")
            source = open_table(rows)
            found = concatenate(list(read_columns(source, layout, bad, num_workers=1)))
            assert found.numbers[0, 0] == float(value), cells
    if value == int(value):
        whole = [int(value), float(value), str(int(value)), f"{int(value)}.0", torch.tensor(int(value)), value]
        whole += [np.array(int(value)), "-0.0", -0.0] if value == 0 else []
        for spelling in whole:
            kinds: tuple[KeyKind, ...] = ("text", "integer")
            for kind in kinds:
                wanted = key(int(value)) if kind == "text" else int(value)
                keyed = ColumnLayout(keys=(KeyColumn(name="c", kind=kind),))
                for cells in ([spelling], [spelling, 7], [spelling, "8"], [spelling, 0.5]):
                    rows = [{"c": cell} for cell in cells]
                    found = concatenate(
                        list(read_columns(open_table(rows), keyed, BadRows(policy="skip"), num_workers=1))
                    )
                    assert found.keys[0, 0] == wanted, (cells, kind)


@st.composite
def decimal_commas(draw: st.DrawFn) -> list[str]:
    """Cells of a column with decimal commas, of which one at least has one."""
    groups = st.tuples(st.integers(1, 999), st.lists(st.integers(0, 999), max_size=2)).map(
        lambda pair: ".".join([str(pair[0]), *(f"{group:03}" for group in pair[1])])
    )
    decimals = st.sampled_from(["", ",5", ",25", ",125"])
    cells = draw(st.lists(st.tuples(st.sampled_from(["", "-"]), groups, decimals).map("".join), min_size=1, max_size=5))
    return [*cells, "0,5"]


@drawn(60)
@given(cells=decimal_commas())
def test_points_between_thousands_are_read_as_pandas_reads_them(
    cells: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("comma") / "a.csv", "".join(["c;d\n", *(f"{cell};x\n" for cell in cells)]))
    wanted = pandas.read_csv(path, sep=";", decimal=",", thousands=".").c.tolist()
    layout = ColumnLayout(numbers=("c",))
    assert read(path, layout).numbers("c").tolist() == wanted
    rows = [{"c": cell} for cell in cells]
    source = open_table(rows, TableSourceConfig(decimal=","))
    assert concatenate(list(read_columns(source, layout, BadRows()))).numbers[:, 0].tolist() == wanted


@drawn(60)
@given(num_rows=st.integers(1, 400), fraction=st.floats(0.01, 0.99) | st.sampled_from([0.05, 0.3, 0.4, 0.6, 0.8]))
def test_the_share_for_evaluation_is_that_of_scikit_learn(num_rows: int, fraction: float) -> None:
    model_selection = pytest.importorskip("sklearn.model_selection")
    table = SyntheticClicks(SyntheticClicksConfig(num_rows=num_rows))
    training, held_out = split_rows(table, "random", fraction, seed=1)
    rows = [each.rows(np.arange(each.num_rows)) for each in (training, held_out)]
    assert sorted(np.concatenate(rows)) == list(range(num_rows))
    wanted = np.ceil(num_rows * fraction)
    if 0 < wanted < num_rows:
        assert wanted == len(model_selection.train_test_split(range(num_rows), test_size=fraction)[1])
    # One in so many is computed row by row, so its last group may have none.
    is_one_in_so_many = abs(round(1 / fraction) * fraction - 1) < 1e-9
    assert 0 <= wanted - held_out.num_rows <= is_one_in_so_many


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_in_clear_words(name: str, tmp_path: Path) -> None:
    make, words = REFUSED[name]
    with pytest.raises(KitforgeError, match=words):
        read(make(tmp_path), ColumnLayout(numbers=("x",), keys=(KeyColumn(name="y"),)))


@pytest.mark.parametrize("text", ["0x10", "0X1f"])
@pytest.mark.parametrize("beside", [[], ["7"], ["x"]], ids=str)
def test_a_hexadecimal_number_is_no_whole_number_beside_any_other(text: str, beside: list[str]) -> None:
    with pytest.raises(DataError, match="holds no 64-bit id"):
        read([{"c": cell} for cell in (text, *beside)], ColumnLayout(keys=(KeyColumn(name="c", kind="integer"),)))
