"""Rows of events (user, item, time) reach the families as sequences, or as a target beside a history."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kitforge.api import load_model
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.describe import describe_table
from kitforge.kits.recommender.schema import read_schema
from kitforge.trainer.run_folder import train
from tests.kits.recommender.runs import ready

KIT = TASKS["recommendation"]

NAMES = ("user_id:token", "item_id:token", "timestamp:float")
TARGETS: dict[str, Any] = {
    "data.schema": {
        "events": {"user": "user", "item": "item", "time": "time", "history": "before", "history_length": 4},
        "categorical": {"item": {"kind": "integer", "encoding": "vocabulary", "table": "items"}},
        "sequences": {"before": {"kind": "integer", "encoding": "vocabulary", "table": "items"}},
    },
    "model.user": ["before"],
    "model.item": ["item"],
}

WORLD = World(device=torch.device("cpu"))
SPLIT = {"split": "time", "eval_fraction": 0.25}


def events(names: tuple[str, str, str] = ("user", "item", "time"), users: int = 60) -> list[dict[str, int]]:
    """Everybody goes through 12 items in a circle, and rows come in any order."""
    rows = [(user, (user + place) % 12, 1000 * place + user) for user in range(users) for place in range(user % 5 + 3)]
    chosen = np.random.default_rng(0).permutation(len(rows))
    return [dict(zip(names, rows[place], strict=True)) for place in chosen]


def _times(rows: Any) -> list[float]:
    columns = rows.columns(np.arange(rows.num_rows))
    return columns.numbers(rows._table.layout.numbers[-1]).tolist()  # type: ignore[no-any-return]


def written(path: Path, rows: list[dict[str, int]]) -> Path:
    lines = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("schema", [None, {"events": dict(zip(("user", "item", "time"), NAMES, strict=True))}])
def test_sasrec_is_trained_on_rows_of_events(tmp_path: Path, schema: Any) -> None:
    path = written(tmp_path / "ratings.inter", events(NAMES))
    choices = {"data.schema": schema, "data.cache": str(tmp_path / "cache")}
    if schema is not None:
        choices["model.max_length"] = 50
    assembly, told = ready(tmp_path / "run", "sasrec", choices, str(path))
    task: Any = assembly.loop.task
    (sequence,) = task._dataset.train.batch(np.arange(60)).sequences.values()
    assert sorted(sequence.lengths.tolist()) == sorted(user % 5 + 3 for user in range(60))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    assert told.lines[-1]["eval/cold_share"] == 0.0
    pipeline = KIT.open_pipeline(assembly.loop.model.eval(), assembly.processor, assembly.options)
    found = pipeline.retrieve({NAMES[1]: ["3", "4"]}, k=12)
    assert {each["item"] for each in found} == {str(item) for item in range(12)}
    output = tmp_path / "found.jsonl"
    predicted = {"task": "recommendation", "checkpoint": str(assembly.folder), "output": str(output)}
    KIT.predict_file(
        KIT.read_options({**predicted, "data": {"eval": str(path)}, "trainer": {"progress": False}}), load_model
    )
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    user = next(line for line in lines if line[NAMES[0]] == "7")
    assert len(lines) == 60 and user[NAMES[1]] == ["7", "8", "9", "10", "11"]
    assert [item["item"] for item in pipeline.retrieve(user, k=10)] == user["items"]


def test_two_tower_takes_a_target_and_the_history_before_it(tmp_path: Path) -> None:
    rows = events()
    assembly, told = ready(tmp_path, "two_tower", {**TARGETS, "data.eval_fraction": 0.0, "data.eval": None}, rows)
    task: Any = assembly.loop.task
    data = task._dataset.train
    assert data.num_rows == len(rows)
    batch = data.batch(np.arange(len(rows)))
    keys = np.array(data.encoder.statistics.vocabularies["items"])
    lengths, targets = batch.sequences["before"].lengths.numpy(), keys[batch.ids["item"].numpy() - 2]
    last = keys[batch.sequences["before"].ids.numpy()[np.arange(len(rows)), np.maximum(lengths - 1, 0)] - 2]
    assert lengths.max() == 4 and (lengths == 0).sum() == 60
    assert (targets == (last + 1) % 12)[lengths > 0].all()  # the target itself is not in its history
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    assert told.lines


def test_a_split_by_time_holds_out_the_newest_rows() -> None:
    options = KIT.read_options({"data": {**SPLIT, "schema": TARGETS["data.schema"]}}).data
    found = load_dataset(events(), None, options, 0, None)
    rows = sorted(row["time"] for row in events())
    (old, new) = (_times(each) for each in (found.train, found.eval))
    assert len(new) == round(0.25 * len(rows)) and sorted([*old, *new]) == rows
    assert max(old) < min(new)


def test_rows_of_one_time_are_on_one_side_of_a_split_by_time() -> None:
    days = ["2024-01-02T00:00:00.25"] * 3 + ["2024-01-03"] * 3 + ["2024-01-02T00:00:00.75"] * 4
    rows = [{"click": n % 2, "site": f"s{n}", "day": day} for n, day in enumerate(days)]
    schema = {"label": {"name": "click"}, "categorical": {"site": {}}}
    options = KIT.read_options({"data": {**SPLIT, "schema": schema, "time_column": "day", "eval_fraction": 0.5}}).data
    found = load_dataset(rows, None, options, 0, None)
    assert len(set(_times(found.train))) == 1 and len(_times(found.train)) == 3
    for bad, words in (({"day": None}, "1 of 11 rows"), ({"day": "soon"}, "holds no number[^$]*soon")):
        with pytest.raises(DataError, match=words):
            load_dataset([*rows, {**rows[0], **bad}], None, options, 0, None)
    with pytest.raises(DataError, match="all rows of training would be held out"):
        load_dataset(rows[:3], None, options, 0, None)
    unnamed = KIT.read_options({"data": {**SPLIT, "schema": schema}}).data
    with pytest.raises(ConfigError, match=r"needs a column of times[^$]*data\.time_column"):
        load_dataset(rows, None, unnamed, 0, None)


def test_sasrec_holds_out_last_items_and_not_the_newest_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.split[^$]*last item of every sequence"):
        ready(tmp_path, "sasrec", {"data.split": "time"})


@pytest.mark.parametrize("family", ["sasrec", "two_tower"])
def test_items_already_taken_are_not_retrieved(tmp_path: Path, family: str) -> None:
    schema = {"events": {"user": "user", "item": "item", "time": "time"}}
    choices = {**TARGETS, "data.eval_fraction": 0.0} if family == "two_tower" else {"data.schema": schema}
    choices = {**choices, "retrieval.exclude_seen": True, "model.max_length": 50, "trainer.max_steps": 2}
    if family == "two_tower":
        del choices["model.max_length"]
    assembly, _ = ready(tmp_path, family, choices, events())
    pipeline = KIT.open_pipeline(assembly.loop.model.eval(), assembly.processor, assembly.options)
    column, taken = ("before", [3, 4, 4]) if family == "two_tower" else ("item", ["3", "4", "4"])
    found = pipeline.retrieve([{column: taken}, {column: []}], k=10)
    assert [len(each) for each in found] == [10, 10]
    assert {int(each["item"]) for each in found[0]} == set(range(12)) - {3, 4}
    task: Any = assembly.loop.task
    rows = task._dataset.train
    with torch.no_grad():
        without = task._objective.evaluate(assembly.loop.model, rows, [np.arange(60)], WORLD)
        task._objective._excludes_seen = False
        plain = task._objective.evaluate(assembly.loop.model, rows, [np.arange(60)], WORLD)
    assert without["mrr"] > plain["mrr"] and without["loss"] == plain["loss"]


def test_what_a_user_has_taken_has_to_be_known_to_be_left_out(tmp_path: Path) -> None:
    schema = {"categorical": {name: {"kind": "integer", "encoding": "vocabulary"} for name in ("user", "item")}}
    choices = {"data.schema": schema, "model.user": ["user"], "model.item": ["item"], "retrieval.exclude_seen": True}
    with pytest.raises(ConfigError, match=r"retrieval\.exclude_seen[^$]*events"):
        ready(tmp_path, "two_tower", choices, events())


def test_events_are_guessed_by_the_names_of_columns(tmp_path: Path) -> None:
    found = describe_table(str(written(tmp_path / "ratings.inter", events(NAMES)))).sequences
    assert found is not None and found.events is not None
    assert (found.events.user, found.events.item, found.events.time) == NAMES
    assert list(found.sequences) == ["item_id"] and found.sequences["item_id"].column == NAMES[1]
    assert describe_table(events(("userId", "movieId", "timestamp"))).sequences is not None
    assert describe_table(events(("user", "item", "price"))).sequences is None


def test_a_schema_of_events_alone_has_their_items_as_a_sequence() -> None:
    schema = read_schema({"events": {"user": "u", "item": "i", "time": "t"}})
    assert list(schema.sequences) == ["i"] and schema.sequences["i"].encoding == "vocabulary"
    with pytest.raises(ConfigError, match="no features"):
        read_schema({"events": {"user": "u", "item": "i", "time": "t", "history": "before"}})


def test_rows_without_sequences_are_told_about_events(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs 1 or more features under sequences[^$]*events: \{user"):
        ready(tmp_path, "sasrec", {"data.schema": None}, events(("user", "item", "price")))
    with pytest.raises(ConfigError, match=r"data\.schema\.events[^$]*come once"):
        ready(tmp_path, "sasrec", {"data.schema": TARGETS["data.schema"]}, iter(events()))
