"""The doors of one trained recommender: every container of a drawn request has the same scores in the pipeline, in a
file of predictions and over HTTP, evaluation has scikit-learn's metrics of them, and a misspelled column is told."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pyarrow import parquet
from sklearn.metrics import log_loss, roc_auc_score

from kitforge.api import evaluate, load_model, load_processor
from kitforge.foundation.errors import KitforgeError
from kitforge.kits.recommender.build import Inputs
from tests.differential.drawn import drawn
from tests.kits.recommender.runs import KIT, run
from tests.kits.recommender.server.test_service import opened, serving
from tests.patience import PATIENCE

Row = dict[str, Any]
USERS, ITEMS, TAGS = ["u1", "U 2", "3", "ü,4", "never seen"], [1, 2, 3, 40, 999], ["a", "b", "c", "never seen"]
SCHEMA = {
    "label": {"name": "took"},
    "numeric": {"price": {"indicator": True}},
    "bucketed": {"height": {"num_buckets": 4}},
    "categorical": {
        "user": {"kind": "text", "encoding": "vocabulary"},
        "item_id": {"kind": "integer", "num_buckets": 50},
        "is_new": {"kind": "integer", "encoding": "vocabulary"},
    },
    "sequences": {"tags": {"kind": "text", "encoding": "vocabulary", "separator": "|", "max_length": 3}},
    "crosses": {"user_item": {"of": ["user", "item_id"], "num_buckets": 50}},
    "left_out": {"item_name": "it has another text in every row"},
}
CELLS: Mapping[str, st.SearchStrategy[Any]] = {
    "user": st.sampled_from(USERS),
    "item_id": st.sampled_from(ITEMS),
    "is_new": st.booleans(),
    "price": st.decimals(-2, 2, places=2, allow_nan=False).map(float),
    "height": st.integers(0, 200),
    "tags": st.lists(st.sampled_from(TAGS), min_size=1, max_size=4),
    "item_name": st.text("ab, ", min_size=1, max_size=4).map(lambda text: f"z{text}z"),
}
FEATURES = [name for name in CELLS if name != "item_name"]
TEXTS = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
NUMBERS = [pa.float64(), pa.float32(), pa.decimal128(5, 2), pa.string()]
TYPES: Mapping[str, Sequence[Any]] = {
    "user": TEXTS,
    "item_id": [pa.int64(), pa.int16(), pa.uint32(), pa.float64(), pa.string()],
    "is_new": [pa.bool_(), pa.int8()],
    "price": NUMBERS,
    "height": [pa.int64(), pa.uint8(), *NUMBERS],
    "tags": [pa.list_(pa.string()), pa.large_list(pa.string())],
    "item_name": TEXTS,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rows, and how they lie in a table."""

    rows: list[Row]
    types: dict[str, Any]
    is_sparse: bool

    @property
    def table(self) -> Any:
        columns = {name: pa.array([row[name] for row in self.rows], CAST[name]) for name in CAST}
        return pa.table({name: columns[name].cast(kind) for name, kind in self.types.items()})

    @property
    def sparse_rows(self) -> list[Row]:
        """The rows, without what is missing where some row has it."""
        there = {name for row in self.rows for name, value in row.items() if value is not None}
        keep = there ^ set(CELLS) if self.is_sparse else set(CELLS)
        return [{name: value for name, value in row.items() if value is not None or name in keep} for row in self.rows]


CAST = {
    "user": pa.string(), "item_id": pa.int64(), "is_new": pa.bool_(), "price": pa.float64(), "height": pa.float64(),
    "tags": pa.list_(pa.string()), "item_name": pa.string(),
}  # fmt: skip


@st.composite
def requests(draw: st.DrawFn) -> Request:
    missing = st.none() if draw(st.booleans()) else st.nothing()
    cells = {name: values | missing for name, values in CELLS.items()}
    rows = draw(st.lists(st.fixed_dictionaries(cells), min_size=1, max_size=5))
    names = draw(st.permutations(list(CELLS)))
    types = {name: draw(st.sampled_from(TYPES[name])) for name in names}
    return Request(rows=rows, types=types, is_sparse=draw(st.booleans()))


@dataclass(frozen=True, kw_only=True)
class Doors:
    """One run, opened for each of its doors."""

    folder: Path
    pipeline: Any
    url: str

    def predict(self, source: Path, suffix: str) -> list[float]:
        target = source.with_name(f"scores{suffix}")
        choices = {"checkpoint": str(self.folder), "output": str(target), "device": "cpu"}
        options = {"data": {"eval": str(source)}, "trainer": {"progress": False}, **choices}
        KIT.predict_file(KIT.read_options(options), lambda *_: self.pipeline.model)
        if suffix == ".jsonl":
            return [json.loads(line)["score"] for line in target.read_text().splitlines()]
        read = pandas.read_csv if suffix == ".csv" else pandas.read_parquet
        return list(map(float, read(target)["score"]))

    def ask(self, **body: Any) -> Any:
        answer = httpx.post(f"{self.url}/score", json=body, timeout=PATIENCE)
        if answer.status_code != 200:
            raise KitforgeError(answer.json()["error"]["message"])
        return answer.json()["scores"]

    def score(self, rows: Any) -> list[float]:
        return [each["score"] for each in self.pipeline(rows)]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    generator = np.random.default_rng(3)
    rows = [
        {
            "user": USERS[place % 4], "item_id": ITEMS[place % 3], "is_new": place % 5 < 2, "price": place % 7 / 4,
            "height": place % 90, "tags": TAGS[: place % 4], "took": int(generator.random() < place % 7 / 7),
        }
        for place in range(120)
    ]  # fmt: skip
    choices = {"data.schema": SCHEMA, "data.cache": str(folder / "cache"), "data.batch_size": 20}
    run(folder / "run", "wide_deep", {**choices, "optimizer.learning_rate": 0.02}, rows=rows)
    options = KIT.read_options({"checkpoint": str(folder / "run"), "device": "cpu"})
    network: Any
    encoder: Any
    network, encoder = load_model(folder / "run", "cpu"), load_processor(folder / "run")
    with serving(opened(folder / "run", max_wait_ms=0)) as url:
        yield Doors(folder=folder / "run", pipeline=KIT.open_pipeline(network, encoder, options), url=url)


def in_file(request: Request, suffix: str, folder: Path) -> Path:
    path = folder / f"request{suffix}"
    if suffix == ".csv":
        tags = ["|".join(each) if each is not None else None for each in request.table["tags"].to_pylist()]
        nullable = {pa.int64(): pandas.Int64Dtype(), pa.int16(): pandas.Int16Dtype(), pa.bool_(): pandas.BooleanDtype()}
        frame = request.table.to_pandas(types_mapper=nullable.get)
        frame.assign(tags=tags).to_csv(path, index=False)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in request.sparse_rows))
    else:
        parquet.write_table(request.table, path)
    return path


@drawn(10, whole=1000)
@given(requests(), st.sampled_from([".csv", ".jsonl", ".parquet"]), st.sampled_from([".csv", ".jsonl", ".parquet"]))
def test_a_request_has_the_same_scores_at_every_door(
    doors: Doors, home: Path, asked: Request, suffix: str, written: str
) -> None:
    wanted = doors.score(asked.rows)
    table = asked.table
    found = {
        "sparse rows": doors.score(asked.sparse_rows),
        "frame": doors.score(table.to_pandas()),
        "Arrow": doors.score(table),
        "rows of the table": doors.score(table.to_pylist()),
        "a file in the pipeline": doors.score(in_file(asked, suffix, home)),
        "a file of predictions": doors.predict(home / f"request{suffix}", written),
        "rows over HTTP": doors.ask(rows=asked.rows),
        "columns over HTTP": doors.ask(columns={name: [row[name] for row in asked.rows] for name in CELLS}),
    }
    for name, scores in found.items():
        assert scores == pytest.approx(wanted, rel=1e-6), name
    assert [doors.pipeline(row)["score"] for row in asked.rows] == pytest.approx(wanted, rel=1e-6)
    assert len({round(score, 6) for score in wanted}) == len({round(score, 6) for score in found["frame"]})


@drawn(10, whole=300)
@given(st.data())
def test_evaluation_has_the_metrics_of_scikit_learn(doors: Doors, data: st.DataObject) -> None:
    cells = st.fixed_dictionaries({**CELLS, "took": st.integers(0, 1)})
    rows = [
        row | {"took": (0, 1, row["took"])[min(place, 2)]}
        for place, row in enumerate(data.draw(st.lists(cells, min_size=2, max_size=20)))
    ]
    truth, scores = [row["took"] for row in rows], doors.score(rows)
    # The order of scores that differ by rounding alone is nobody's.
    assume(np.diff(np.sort(scores)).min() > 1e-6)
    options = KIT.read_options({"checkpoint": str(doors.folder), "device": "cpu", "trainer": {"progress": False}})
    given_rows: Any = Inputs(eval_dataset=rows)
    found = evaluate(options, given_rows)
    assert found["eval/auc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)
    assert found["eval/loss"] == pytest.approx(log_loss(truth, scores), rel=1e-5)


SLIPS = {"user": "usr", "item_id": "itemid", "is_new": "isNew", "price": "prise", "height": "heigth", "tags": "tagss"}


@drawn(15, whole=500)
@given(requests(), st.sampled_from(FEATURES), st.booleans(), st.data())
def test_a_misspelled_column_is_told_in_every_row_at_every_door(
    doors: Doors, home: Path, asked: Request, name: str, has_none: bool, data: st.DataObject
) -> None:
    rows = asked.rows
    place = data.draw(st.integers(0, len(rows)))
    wrong = {SLIPS.get(key, key) if key == name else key: value for key, value in CELLS_OF_A_ROW.items()}
    wrong = {"prize": 1, "persons": 2} if has_none else wrong
    rows = [*rows[:place], wrong, *rows[place:]]
    (home / "wrong.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "persons, prize|'persons'|'prize'|has no column" if has_none else name
    tried: dict[str, Callable[[], Any]] = {
        "rows": lambda: doors.score(rows),
        "an iterator": lambda: doors.score(iter(rows)),
        "a file in the pipeline": lambda: doors.score(home / "wrong.jsonl"),
        "a file of predictions": lambda: doors.predict(home / "wrong.jsonl", ".csv"),
        "HTTP": lambda: doors.ask(rows=rows),
        "a frame": lambda: doors.score(pandas.DataFrame([wrong])),
        "one row": lambda: doors.pipeline(wrong),
    }
    for door, score in tried.items():
        with pytest.raises(KitforgeError, match=told):
            pytest.fail(f"{door}: {score()}")


CELLS_OF_A_ROW: Row = {
    "user": "u1", "item_id": 2, "is_new": True, "price": 1.5, "height": 9, "tags": ["a"], "item_name": "n",
}  # fmt: skip


@pytest.mark.prove
def test_sparse_rows_and_columns_that_no_feature_is_read_from_are_scored(doors: Doors) -> None:
    whole = CELLS_OF_A_ROW
    tables: list[list[dict[Any, Any]]] = [
        # Another column beside the one that it resembles, one that was left out, a series, and nothing.
        [whole, {**whole, "prices": 3}, {"user": "u1", "prices": 3}],
        [whole, {"item_name": "n"}],
        [whole | {"tags_1": 1}, {"user": "u1", "tags_2": 5}],
        [whole, {}],
        [whole, {"user": "u1", 3: 4}],
    ]
    for rows in tables:
        nulls = [{**dict.fromkeys(FEATURES), **row} for row in rows]
        assert doors.score(rows) == doors.score(nulls)
