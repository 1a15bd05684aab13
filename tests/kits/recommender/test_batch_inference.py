"""`kitforge predict`: files of rows become files of scores or items, in order, whole or not at all."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from kitforge.api import pipeline
from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.recommender import batch_inference
from kitforge.kits.recommender import pipeline as pipelines
from kitforge.trainer.run_folder import train
from tests.kits.recommender.runs import ready
from tests.kits.recommender.test_pipeline import cell, rows


def write(path: Path, given: list[dict[str, Any]]) -> None:
    names = ["user", *given[0]]
    lines = [[f"u{place}", *(cell(value) for value in row.values())] for place, row in enumerate(given)]
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([names, *lines])


def read(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".csv":
        with open(path, newline="") as file:
            return list(csv.DictReader(file))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return found


def predict(folder: Path, source: Path, target: Path, *more: str) -> list[dict[str, Any]]:
    assert cli.run(["predict", f"checkpoint={folder}", f"data.eval={source}", f"output={target}", *more]) == 0
    return read(target)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_scores_of_a_file_are_those_of_the_pipeline(
    runs: dict[str, Path], tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pipelines, batch_inference):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 7)
    monkeypatch.setattr("kitforge.data.file_bytes._BLOCK_BYTES", 300)
    given = rows(20)
    write(tmp_path / "rows.csv", given)
    found = predict(runs["wide_deep"], tmp_path / "rows.csv", tmp_path / f"scores{suffix}")
    expected = pipeline("recommendation", model=runs["wide_deep"])(given)
    assert [np.float32(row["score"]) for row in found] == [np.float32(row["score"]) for row in expected]
    assert [row["user"] for row in found] == [f"u{place}" for place in range(20)]
    assert [row["history"] or "" for row in found] == [cell(row["history"]) for row in given]
    assert not list(tmp_path.glob(".*draft"))


def test_chosen_columns_are_kept(runs: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", rows(3))
    found = predict(runs["wide_deep"], tmp_path / "rows.csv", tmp_path / "scores.csv", "predict.columns=[user,c2]")
    assert [list(row) for row in found] == [["user", "c2", "score"]] * 3


@pytest.mark.slow
def test_a_bad_row_is_named_and_no_file_is_left(runs: dict[str, Path], tmp_path: Path) -> None:
    given = rows(4)
    given[2]["c1"] = "x"
    write(tmp_path / "rows.csv", given)
    with pytest.raises(DataError, match=r"rows\.csv:4 holds no 64-bit id in column 'c1'"):
        predict(runs["wide_deep"], tmp_path / "rows.csv", tmp_path / "scores.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]
    found = predict(runs["wide_deep"], tmp_path / "rows.csv", tmp_path / "scores.csv", "data.on_invalid=skip")
    assert [row["user"] for row in found] == ["u0", "u1", "u3"]
    expected = pipeline("recommendation", model=runs["wide_deep"])([given[place] for place in (0, 1, 3)])
    assert [np.float32(row["score"]) for row in found] == [np.float32(row["score"]) for row in expected]


@pytest.mark.slow
def test_items_are_found_for_every_user_of_a_file(runs: dict[str, Path], tmp_path: Path) -> None:
    users = [{name: row[name] for name in ("c1", "history", "d1")} for row in rows(5)]
    write(tmp_path / "users.csv", users)
    source, target = tmp_path / "users.csv", tmp_path / "items.jsonl"
    found = predict(runs["two_tower"], source, target, "predict.top_k=3", "predict.columns=[user]")
    expected = pipeline("recommendation", model=runs["two_tower"]).retrieve(users, k=3)
    assert [row["items"] for row in found] == [[item["item"] for item in row] for row in expected]
    assert [row["scores"] for row in found] == [[item["score"] for item in row] for row in expected]
    again = predict(runs["two_tower"], source, tmp_path / "items.csv", "predict.top_k=3")
    assert [json.loads(row["items"]) for row in again] == [row["items"] for row in found]


@pytest.mark.slow
def test_what_cannot_be_written_is_refused_first(runs: dict[str, Path], tmp_path: Path) -> None:
    write(tmp_path / "rows.csv", rows(3))
    source = tmp_path / "rows.csv"
    with pytest.raises(ConfigError, match="output"):
        predict(runs["wide_deep"], source, tmp_path / "scores.txt")
    with pytest.raises(ConfigError, match="file exists"):
        predict(runs["wide_deep"], source, source)
    with pytest.raises(ConfigError, match="overwrite their input"):
        predict(runs["wide_deep"], source, source, "overwrite=true")
    with pytest.raises(ConfigError, match="predictions need a run"):
        cli.run(["predict", f"checkpoint={runs['wide_deep']}"])
    write(source, [row | {"score": 1} for row in rows(3)])
    with pytest.raises(DataError, match="would overwrite"):
        predict(runs["wide_deep"], source, tmp_path / "scores.csv")


def test_a_file_is_read_as_that_of_the_run_was(tmp_path: Path) -> None:
    lines = [f"{place % 2},{place % 7},{place % 5}" for place in range(300)]
    (tmp_path / "plain.csv").write_text("\n".join(lines) + "\n")
    schema = {"label": {"name": "click"}, "categorical": {name: {"kind": "integer"} for name in ("user", "item")}}
    choices = {"data.columns": ["click", "user", "item"], "data.schema": schema}
    assembly, _ = ready(tmp_path / "run", "wide_deep", choices, str(tmp_path / "plain.csv"))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    found = predict(tmp_path / "run", tmp_path / "plain.csv", tmp_path / "scores.csv")
    assert [row["item"] for row in found] == [str(place % 5) for place in range(300)]
