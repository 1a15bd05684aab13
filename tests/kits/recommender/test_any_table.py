"""Tables of any columns, in any container, are trained on or refused by an error that says what to do."""

import json
import tempfile
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pandas
import pyarrow
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pyarrow import parquet
from safetensors.torch import load_file
from torch import nn

from kitforge.core.checkpoint.safetensors_file import write
from kitforge.data.tables.source import open_table
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.errors import DataError
from kitforge.kits.recommender.batch_inference import write_predictions
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.describe import describe_table, render_description
from tests.differential.drawn import drawn
from tests.kits.recommender.runs import ready, run

KIT = TASKS["recommendation"]

CELLS: dict[str, st.SearchStrategy[Any]] = {
    "integers": st.integers(-5, 60),
    "long integers": st.integers(-(2**70), 2**70),
    "floats": st.floats(width=32),
    "long floats": st.floats(),
    "texts": st.text("ab1. ,\"'-é", max_size=5),
    "bools": st.booleans(),
    "dates": st.dates(date(1900, 1, 1), date(2100, 1, 1)),
    "times": st.datetimes(datetime(1900, 1, 1), datetime(2100, 1, 1)),
    "decimals": st.decimals(-100, 100, places=2),
    "lists": st.lists(st.integers(0, 9), max_size=3),
    "texts in lists": st.lists(st.sampled_from(["a", "b c", ""]), max_size=2),
    "objects": st.fixed_dictionaries({"a": st.integers(0, 3)}),
    "nested": st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=2),
    "nothing": st.sampled_from([None, float("nan"), ""]),
}
CONTAINERS = ("rows", "frame", "csv", "jsonl", "parquet")


def written(rows: list[dict[str, Any]], container: str, folder: Path) -> Any:
    if container == "rows":
        return rows
    frame = pandas.DataFrame({name: pandas.Series([row[name] for row in rows], dtype=object) for name in rows[0]})
    if container == "frame":
        return frame
    path = folder / f"a.{container}"
    if container == "csv":
        frame.to_csv(path, index=False)
    elif container == "jsonl":
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    else:
        try:
            parquet.write_table(pyarrow.Table.from_pandas(frame), path)
        except (pyarrow.ArrowException, OverflowError):
            return frame
    return str(path)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[dict[str, Any]], str]:
    """Rows of a label and up to three columns, each of one or two kinds of cells, one after the other or mixed."""
    num_rows = draw(st.integers(2, 30))
    columns: dict[str, list[Any]] = {"label": [number % 2 for number in range(num_rows)]}
    columns["x"] = [number / 7 for number in range(num_rows)]
    for name in ("a", "b", "history")[: draw(st.integers(1, 3))]:
        kinds = draw(st.lists(st.sampled_from(sorted(CELLS)), min_size=1, max_size=2))
        is_mixed = draw(st.booleans())
        picks = [kinds[(number if is_mixed else 2 * number // num_rows) % len(kinds)] for number in range(num_rows)]
        columns[name] = [draw(CELLS[kind]) for kind in picks]
    rows = [{name: values[number] for name, values in columns.items()} for number in range(num_rows)]
    return rows, draw(st.sampled_from(CONTAINERS))


# The second day lies before the year 1, with which Python's calendar begins.
EARLY = [{"label": number % 2, "x": number / 7, "a": (date(2000, 1, 1), -719163)[number]} for number in (0, 1)]


@drawn(15, whole=400)
@given(tables())
@example((EARLY, "parquet"))
def test_a_table_of_any_columns_is_trained_on_or_refused_in_words(table: tuple[list[dict[str, Any]], str]) -> None:
    rows, container = table
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            spec = written(rows, container, folder)
            render_description(describe_table(spec))
            assembly, _ = ready(folder / "run", "wide_deep", {"data.eval_fraction": 0.0, "trainer.max_steps": 1}, spec)
            opened = KIT.open_pipeline(assembly.loop.model, assembly.processor, assembly.options)
            for suffix in ("csv", "jsonl", "parquet"):
                write_predictions(opened, open_table(spec), folder / f"scores.{suffix}", lambda _: None)
        except DataError as error:
            # An error of ours, which says what was found.
            assert "\n" in str(error), str(error)


SECOND = {
    "null, then text": [None] * 1500 + ["x"] * 1500,
    "integer, then float": [3] * 1500 + [3.5] * 1500,
    "integer, then text": [3] * 1500 + ["x"] * 1500,
    "empty, then list": [[]] * 1500 + [["a"]] * 1500,
    "list, then text": [["a"]] * 1500 + ["a b"] * 1500,
    "object, then number": [{"a": 1}] * 1500 + [2] * 1500,
    "bool, then integer": [True] * 1500 + [2] * 1500,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run(folder, "wide_deep", {"trainer.max_steps": 1}, rows=[{"x": n / 3, "click": n % 2} for n in range(200)])
    return folder


@pytest.mark.parametrize("values", SECOND.values(), ids=SECOND)
def test_predictions_keep_columns_that_change_their_type_along_the_rows(
    values: list[Any], folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"x": n / 7, "note": value}) + "\n" for n, value in enumerate(values)))
    describe_table(str(path), num_rows=3000)
    for part, chosen in (("a", values[:1500]), ("b", values[1500:])):
        parquet.write_table(pyarrow.table({"x": [0.5] * 1500, "note": chosen}), tmp_path / f"{part}.parquet")
    for source in (str(path), [str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")]):
        for suffix in ("csv", "jsonl", "parquet"):
            target = tmp_path / f"out.{suffix}"
            asked = {"checkpoint": str(folder), "output": str(target), "data": {"eval": source}}
            options = KIT.read_options({"task": "recommendation", "trainer": {"progress": False}, **asked})
            KIT.predict_file(options, lambda spec, device, _: KIT.load(Path(spec), torch.device("cpu")))
            read = {"csv": pandas.read_csv, "parquet": pandas.read_parquet}.get(suffix)
            found = pandas.read_json(target, lines=True) if read is None else read(target)
            assert len(found) == 3000 and found["score"].notna().all()


def test_a_column_may_change_its_type_behind_the_rows_that_are_described(tmp_path: Path) -> None:
    lines = [f"{n if n < 200_500 else 'x'},{n % 2},{n / 3}" for n in range(201_000)]
    (tmp_path / "a.csv").write_text("note,click,x\n" + "\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"holds no number in column 'note'.*|a different value"):
        ready(tmp_path / "run", "wide_deep", {}, str(tmp_path / "a.csv"))


def test_lines_that_end_in_returns_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"x,click\r1,0\r2,1\r")
    with pytest.raises(DataError, match=r"(?s)a\.csv:1 cannot be divided.*tr"):
        describe_table(str(tmp_path / "a.csv"))


@pytest.mark.parametrize("lists", [[[1], [2]], [[], []], [[3], []]], ids=str)
def test_sequences_without_a_target_are_nothing_to_train_on(lists: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)nothing to train on.*expected"):
        ready(tmp_path, "sasrec", {}, [{"items": items} for items in lists * 10])


@pytest.mark.parametrize("kind", ["dictionary", "bytes", "bytes that are no text"])
def test_texts_of_any_type_in_parquet_are_categories(kind: str, tmp_path: Path) -> None:
    texts = [f"c{n % 7}" for n in range(60)]
    arrays = {
        "dictionary": pyarrow.array(texts).dictionary_encode(),
        "bytes": pyarrow.array([text.encode() for text in texts]),
        "bytes that are no text": pyarrow.array([text.encode() + b"\xff" for text in texts]),
    }
    parquet.write_table(
        pyarrow.table({"city": arrays[kind], "click": [n % 2 for n in range(60)]}), tmp_path / "a.parquet"
    )
    assembly, _ = ready(tmp_path / "run", "wide_deep", {}, str(tmp_path / "a.parquet"))
    assert assembly.processor.schema.categorical["city"].kind == "text"


def test_columns_of_one_name_are_refused_in_every_container(tmp_path: Path) -> None:
    arrays = [pyarrow.array([1, 2]), pyarrow.array([1, 2]), pyarrow.array([0, 1])]
    table = pyarrow.Table.from_arrays(arrays, ["user", "user", "click"])
    parquet.write_table(table, tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("user,user,click\n1,2,0\n")
    frame = pandas.DataFrame([[1, 2, 0]], columns=["user", "user", "click"])
    for rows in (str(tmp_path / "a.parquet"), str(tmp_path / "a.csv"), table, frame, frame.astype(object)):
        with pytest.raises(DataError, match=r"(?s)user twice.*a different name"):
            open_table(rows)


def test_the_row_numbers_that_pandas_writes_are_no_feature(tmp_path: Path) -> None:
    pandas.DataFrame({"x": [0.5, 1.5, 2.5] * 20, "click": [0, 1, 0] * 20}).to_csv(tmp_path / "a.csv")
    schema = describe_table(str(tmp_path / "a.csv")).schema
    assert list(schema.numeric) == ["x"] and schema.left_out == {"Unnamed: 0": "a column without a name"}


@pytest.mark.parametrize("time", ["31.12.2024", "12/31/2024", "2024/12/31 10:00"])
def test_a_date_in_another_form_is_refused_with_the_form_that_is_read(time: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"user_id,item_id,timestamp\n1,2,{time}\n1,3,{time}\n")
    with pytest.raises(DataError, match=r"(?s)column 'timestamp'.*ISO 8601"):
        ready(tmp_path / "run", "sasrec", {"data.schema": None}, str(tmp_path / "a.csv"))


def test_an_empty_tensor_of_any_strides_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.zeros(1, 0).expand(3, 0)[:, ::1], "b": torch.zeros(1, dtype=torch.int64).expand(5)[:0]}
    write(path, list(tensors.items()))
    assert {name: tuple(each.shape) for name, each in load_file(path).items()} == {"a": (3, 0), "b": (0,)}


def test_a_network_over_a_table_can_be_compiled() -> None:
    torch.manual_seed(0)
    table = CachedEmbedding(None, 4)
    network = nn.Sequential(table, nn.Linear(4, 1))
    ids = torch.arange(6).reshape(2, 3)
    expected = network(ids)
    assert torch.equal(torch.compile(network, backend="eager")(ids), expected)
