"""Evaluations and servers say how many values of a feature training never saw."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from kitforge import pipeline
from kitforge.api import load_model, load_processor
from kitforge.core.parallel.config import ParallelConfig
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.kits.recommender.server.requests import known_fields
from kitforge.kits.recommender.server.service import Query, RecommenderService
from tests.distributed.training import TestRendezvous
from tests.kits.recommender.runs import run

KIT = TASKS["recommendation"]
SCHEMA = {
    "label": {"name": "click"},
    "numeric": {"price": {}},
    "categorical": {name: {"encoding": "vocabulary"} for name in ("city", "is_new", "zip")},
    "bags": {"tags": {"encoding": "vocabulary"}},
}


def table(num_rows: int = 200) -> pandas.DataFrame:
    draw = np.random.default_rng(0)
    zips = draw.integers(100, 120, num_rows).astype(float)
    zips[::10] = np.nan
    return pandas.DataFrame(
        {
            "price": draw.normal(size=num_rows),
            "city": draw.choice(["a", "b", "c"], num_rows),
            "is_new": draw.integers(0, 2, num_rows) > 0,
            "zip": zips,
            "tags": [[int(tag)] for tag in draw.integers(0, 4, num_rows)],
            "click": draw.integers(0, 2, num_rows),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    table().to_json(folder / "rows.jsonl", orient="records", lines=True)
    choices = {"data.schema": SCHEMA, "data.train": str(folder / "rows.jsonl"), "data.missing_values": ["?"]}
    run(folder / "run", "wide_deep", choices, rows=str(folder / "rows.jsonl"))
    return folder / "run"


def evaluated(folder: Path, rows: Any) -> dict[str, float]:
    values = {"task": "recommendation", "checkpoint": str(folder), "data": {"eval": "rows"}, "device": "cpu"}
    found: dict[str, float] = KIT.evaluate(
        KIT.read_options(values), Inputs(eval_dataset=rows), TestRendezvous(ParallelConfig())
    )
    return {name.removeprefix("eval/unknown_share/"): value for name, value in found.items() if "unknown" in name}


def test_rows_of_another_container_have_no_unknown_values(folder: Path, tmp_path: Path) -> None:
    frame = table()
    flat = frame.assign(tags=[" ".join(map(str, tags)) for tags in frame["tags"]])
    flat.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_parquet(tmp_path / "rows.parquet")
    wanted = dict.fromkeys(("city", "is_new", "zip", "tags"), 0.0)
    for rows in (frame, frame.to_dict("records"), str(tmp_path / "rows.csv"), str(tmp_path / "rows.parquet")):
        assert evaluated(folder, rows) == wanted


def test_an_evaluation_says_how_many_values_of_each_feature_are_unknown(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = table(100).assign(city="elsewhere")
    frame.loc[:24, "zip"] = 5
    with caplog.at_level(logging.WARNING):
        found = evaluated(folder, frame)
    present = int(frame["zip"].notna().sum())
    assert found == {"city": 1.0, "is_new": 0.0, "zip": pytest.approx(25 / present), "tags": 0.0}
    (warning,) = [record.getMessage() for record in caplog.records if "never occurred" in record.getMessage()]
    assert "100% of the values of 'city'" in warning


def test_a_server_says_how_many_values_of_each_feature_are_unknown(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = KIT.read_options({"task": "recommendation", "checkpoint": str(folder)})
    service: RecommenderService = KIT.open_service(load_model(folder, "cpu"), load_processor(folder), "m", options)
    assert service.row_reader is not None
    row = {"price": 1.0, "city": "b", "is_new": True, "zip": 104.0, "tags": [1]}
    for city in ["nowhere"] * 30 + ["a"] * 10:
        body = json.dumps({"rows": [{**row, "city": city}]}).encode()
        service.answer([Query(batch=service.row_reader.read(known_fields(body, ("rows", "columns"))))])
    text = service.metrics.rendered()[0].decode()
    assert 'kitforge_unknown_share{feature="city"} 0.75' in text and 'kitforge_unknown_share{feature="zip"} 0.0' in text
    assert sum("never occurred" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("serving_dtype", [None, "int8"])
@pytest.mark.parametrize("encoding", ["hash", "exact"])
def test_a_server_tells_ids_without_a_vocabulary_by_their_rows(
    encoding: str, serving_dtype: str | None, tmp_path: Path
) -> None:
    feature = {"encoding": encoding}
    schema = {
        "label": {"name": "click"},
        "categorical": {"city": feature, "zip": {**feature, "kind": "integer"}},
        "bags": {"tags": feature},
        "sequences": {"visited": {**feature, "table": "city", "max_length": 3}},
    }
    rows = [{**row, "visited": ["a", "b"]} for row in table().to_dict("records")]
    run(tmp_path, "wide_deep", {"data.schema": schema}, rows=rows)
    options = KIT.read_options(
        {"task": "recommendation", "checkpoint": str(tmp_path), "tables": {"serving_dtype": serving_dtype}}
    )
    service: RecommenderService = KIT.open_service(load_model(tmp_path, "cpu"), load_processor(tmp_path), "m", options)
    assert service.row_reader is not None
    row = {"zip": 104, "tags": [1], "visited": ["a"]}
    asked = [{**row, "city": f"nowhere {n}"} for n in range(30)] + [
        {**row, "city": "a", "zip": None, "visited": []}
    ] * 10
    body = json.dumps({"rows": asked}).encode()
    service.answer([Query(batch=service.row_reader.read(known_fields(body, ("rows", "columns"))))])
    shares = service.metrics.unknown_shares
    assert shares == {"city": pytest.approx(0.75, abs=0.03), "zip": 0.0, "tags": 0.0, "visited": 0.0}


def test_every_door_reads_a_cell_in_the_same_way(folder: Path, tmp_path: Path) -> None:
    scored = pipeline("recommendation", model=folder)
    options = KIT.read_options({"task": "recommendation", "checkpoint": str(folder)})
    service: RecommenderService = KIT.open_service(load_model(folder, "cpu"), load_processor(folder), "m", options)
    assert service.row_reader is not None
    row = {"price": 1.0, "city": "b", "is_new": True, "zip": 104, "tags": [1]}
    same = [{**row, **change} for change in ({}, {"zip": 104.0}, {"zip": "104.0"}, {"is_new": "True"}, {"city": " b"})]
    body = json.dumps({"rows": same}).encode()
    batch = service.row_reader.read(known_fields(body, ("rows", "columns")))
    scores = service.answer([Query(batch=batch)])[0].rows
    assert len({score["score"] for score in scored(same)} | set(scores)) == 1
    assert {scored(each)["score"] for each in same} == set(scores)
