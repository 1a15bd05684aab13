"""What a run answers: chances of rows, items for users, and the metrics of other rows."""

import json
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from kitforge.api import evaluate, load_model, load_processor, pipeline
from kitforge.cli import main as cli
from kitforge.data.tables.synthetic_clicks import SyntheticClicks
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError, ModelError
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.kits.recommender.item_catalog import load_item_catalog
from kitforge.kits.recommender.model import inputs_of
from kitforge.kits.registry import kit_of, recorded_task
from kitforge.trainer.run_folder import train
from tests.kits.recommender.runs import LOG, ready, rows_of, run
from tests.text_keys import hash_text

KIT = TASKS["recommendation"]


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows of the log as a person would write them, without the label."""
    log = SyntheticClicks(LOG)
    columns = log.rows(np.arange(num_rows))
    return [
        {
            **{f"c{place + 1}": int(key) for place, key in enumerate(columns.keys[row])},
            **{f"d{place + 1}": float(number) for place, number in enumerate(columns.numbers[row])},
            "history": columns.lists["history"].take(np.array([row])).values.tolist(),
        }
        for row in range(num_rows)
    ]


def cell(value: Any) -> str:
    """A value as a CSV file has it."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def test_scores_are_those_that_the_run_was_evaluated_by(runs: dict[str, Path]) -> None:
    model = load_model(runs["wide_deep"], "cpu")
    with pytest.raises(ConfigError, match="fp32 for the network of a recommender"):
        load_model(runs["wide_deep"], "cpu", "bf16")
    encoder = load_processor(runs["wide_deep"])
    options = KIT.read_options({"checkpoint": str(runs["wide_deep"]), "device": "cpu"})
    score = kit_of("recommendation").open_pipeline(model, encoder, options)
    assembly, _ = ready(runs["wide_deep"].parent / "again", "wide_deep", {"checkpoint": str(runs["wide_deep"])})
    trained: Any = assembly.loop.model.eval()
    samples = rows(40)
    expected = []
    for encoded in score._batches(samples):
        with torch.no_grad():
            expected += trained.logits(inputs_of(encoded, trained.requests)).sigmoid().tolist()
    assert [each["score"] for each in score(samples)] == expected


@pytest.mark.parametrize("family", ["two_tower", "sasrec"])
def test_items_are_found_best_first(runs: dict[str, Path], family: str) -> None:
    find = pipeline("recommendation", model=runs[family])
    user = rows(1)[0] if family == "two_tower" else {"items": [3, 4, 5]}
    found = find.retrieve(user, k=5)
    assert len({each["item"] for each in found}) == 5
    assert [each["score"] for each in found] == sorted((each["score"] for each in found), reverse=True)
    everything = find.retrieve(user, k=10_000)
    assert len(everything) == len(find.model.item_catalog)
    assert everything[:5] == found
    known = set(find.model.item_catalog.keys.tolist())
    assert {each["item"] for each in everything} == known


@pytest.mark.slow
def test_users_come_in_every_form_of_a_table(runs: dict[str, Path], tmp_path: Path) -> None:
    find, score = (pipeline("recommendation", model=runs[family]) for family in ("two_tower", "wide_deep"))
    users = [row | {"history": list(row["history"])} for row in rows(4)]
    frame = pd.DataFrame(users)
    frame.to_parquet(tmp_path / "users.parquet")
    (tmp_path / "users.csv").write_text(
        "\n".join([",".join(users[0]), *(",".join(map(cell, each.values())) for each in users)])
    )
    forms: dict[str, Any] = {
        "frame": frame, "Arrow": pa.Table.from_pandas(frame), "records": frame.to_records(index=False),
        "iterator": iter(users), "Parquet": str(tmp_path / "users.parquet"), "csv": tmp_path / "users.csv",
    }  # fmt: skip
    found, scored = find.retrieve(users, k=3), score(users)
    for name, form in forms.items():
        assert find.retrieve(form, k=3) == found, name
        assert score(iter(users) if name == "iterator" else form) == scored, name
    assert find.retrieve(frame.iloc[1], k=3) == found[1] and score(frame.iloc[1]) == scored[1]
    assert find.retrieve(frame[:0], k=3) == find.retrieve(iter([]), k=3) == []
    for wrong in ([1, 2], "no such file.csv", 7):
        with pytest.raises(DataError, match="got|no such"):
            find.retrieve(wrong, k=3)


def test_a_found_item_has_the_score_of_its_pair(runs: dict[str, Path]) -> None:
    find = pipeline("recommendation", model=runs["two_tower"])
    users = rows(3)
    temperature = find.model.config.temperature
    for user in users:
        # The towers know an item by c2 and c3; in the catalogue it has the c3 of the first row that has it.
        best = {each["item"]: each["score"] for each in find.retrieve(user, k=10_000)}
        place = find.model.item_catalog.keys.tolist().index(user["c2"])
        samples = find.model.item_catalog.samples
        own_c3 = find.encoder.ids_of("c3", np.array([user["c3"]]))[0]
        if int(samples.ids["c3"][place]) == own_c3:
            chance = 1 / (1 + np.exp(-best[user["c2"]] / temperature))
            assert find(user)["score"] == pytest.approx(chance, abs=1e-6)


def shop(folder: Path) -> Path:
    """Who takes what, in texts: everybody goes through the same things in a circle."""
    things = [f"thing №{number}" for number in range(12)]
    lines = ["user,thing,things,took"]
    for number in range(200):
        taken = "|".join(things[(number + step) % 12] for step in range(5))
        lines.append(f"u{number % 20},{things[number % 12]},{taken},{number % 2}")
    (folder / "shop.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "shop.csv"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["two_tower", "sasrec"])
def test_items_have_the_names_that_the_data_call_them(tmp_path: Path, family: str) -> None:
    things = {"kind": "text", "encoding": "vocabulary"}
    schema: dict[str, Any] = {"sequences": {"things": {**things, "separator": "|", "max_length": 6}}}
    options: dict[str, Any] = {}
    if family == "two_tower":
        schema = {"categorical": {"user": things, "thing": things}, "label": {"name": "took"}}
        options = {"model.user": ["user"], "model.item": ["thing"]}
    choices = {"data.schema": schema, "data.cache": str(tmp_path / "cache"), **options}
    assembly, _ = ready(tmp_path / "run", family, choices, shop(tmp_path))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    user = {"user": "u3"} if family == "two_tower" else {"things": ["thing №4", "thing №5"]}
    find = pipeline("recommendation", model=tmp_path / "run")
    if family == "two_tower":
        user["thing"] = None
    found = find.retrieve(user, k=12)
    assert {each["item"] for each in found} == {f"thing №{number}" for number in range(12)}
    catalogue = find.model.item_catalog
    for place in range(12):
        assert catalogue.keys[place] == hash_text(catalogue.item(place))
    in_memory = kit_of("recommendation").open_pipeline(assembly.loop.model, assembly.processor, assembly.options)
    assert [each["item"] for each in in_memory.retrieve(user, k=12)] == [each["item"] for each in found]
    find.save_index(tmp_path / "index")
    assert load_item_catalog(tmp_path / "index" / "items.safetensors").item(7) == catalogue.item(7)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "int8"])
def test_smaller_tables_score_nearly_alike_and_are_made_once(runs: dict[str, Path], dtype: str) -> None:
    options = {"tables.serving_dtype": dtype, "device": "cpu"}
    plain = pipeline("recommendation", model=runs["wide_deep"])(rows(20))
    smaller = pipeline("recommendation", model=runs["wide_deep"], options=options)
    assert {table.dtype for table in smaller.model.tables.tables.values()} == {dtype}
    found = [each["score"] for each in smaller(rows(20))]
    assert found == pytest.approx([each["score"] for each in plain], abs=1e-3)
    assert found != [each["score"] for each in plain]
    (made,) = (runs["wide_deep"] / "serving").glob(f"*/{dtype}/tables/manifest.json")
    before = made.stat()
    again = pipeline("recommendation", model=runs["wide_deep"], options=options)
    assert [each["score"] for each in again(rows(20))] == found
    assert made.stat().st_mtime_ns == before.st_mtime_ns


def test_a_model_that_is_trained_has_no_smaller_tables(tmp_path: Path) -> None:
    assembly, _ = ready(tmp_path, "wide_deep", {})
    options = {"tables.serving_dtype": "int8"}
    with pytest.raises(ConfigError, match="model=RUN"):
        pipeline("recommendation", assembly.loop.model, assembly.processor, options)


@pytest.mark.slow
def test_the_index_of_a_step_is_made_once(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, own = rows(1)[0], tmp_path / "run"
    shutil.copytree(runs["two_tower"], own, ignore=shutil.ignore_patterns("serving"))
    found = pipeline("recommendation", model=own).retrieve(user, k=5)
    (kept,) = (own / "serving").glob("*/items-*.faiss")
    again = pipeline("recommendation", model=own)
    monkeypatch.setattr("kitforge.kits.recommender.pipeline.build_index", None)
    assert again.retrieve(user, k=5) == found
    # Another step has another manifest, so nothing of this one is taken for its own.
    manifest = again.model.checkpoint_folder / "manifest.json"
    manifest.write_text(manifest.read_text() + " ")
    with pytest.raises(TypeError):
        pipeline("recommendation", model=own).retrieve(user, k=5)
    assert kept.exists()


@pytest.mark.slow
def test_an_index_that_faiss_cannot_make_and_numbers_that_mean_nothing_are_refused(runs: dict[str, Path]) -> None:
    for kind, words in (("Flatt", "could not parse index string Flatt"), ("IVF4096,Flat", "number of clusters")):
        find = pipeline("recommendation", model=runs["sasrec"], options={"retrieval.index": kind})
        with pytest.raises(ConfigError, match=rf"(?s){words}.*retrieval\.index=Flat"):
            find.retrieve({"items": [1]})
    find = pipeline("recommendation", model=runs["sasrec"])
    with pytest.raises(ConfigError, match=r"invalid value for option 'k'"):
        find.retrieve({"items": [1]}, k=0)
    assert find.retrieve([], k=3) == []
    assert pipeline("recommendation", model=runs["wide_deep"])([]) == []


def test_an_index_is_exported(runs: dict[str, Path], tmp_path: Path) -> None:
    find = pipeline("recommendation", model=runs["sasrec"])
    find.save_index(tmp_path / "index")
    index = faiss.read_index(str(tmp_path / "index" / "items.faiss"))
    assert index.ntotal == len(find.model.item_catalog)
    assert sorted(path.name for path in (tmp_path / "index").iterdir()) == ["items.faiss", "items.safetensors"]


def test_the_command_line_exports_an_index_or_says_who_has_one(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "index"
    assert cli.run(["export", f"checkpoint={runs['two_tower']}", f"output_dir={target}"]) == 0
    assert "items.faiss, items.safetensors" in capsys.readouterr().out
    catalogue = load_item_catalog(target / "items.safetensors")
    assert faiss.read_index(str(target / "items.faiss")).ntotal == len(catalogue)
    with pytest.raises(ModelError, match="finds no items"):
        cli.run(["export", f"checkpoint={runs['wide_deep']}", f"output_dir={target}"])


def test_families_that_score_find_nothing_and_the_other_way_round(runs: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="finds no items"):
        pipeline("recommendation", model=runs["wide_deep"]).retrieve(rows(1)[0])
    with pytest.raises(ModelError, match="scores no pairs"):
        pipeline("recommendation", model=runs["sasrec"])({"items": [1, 2]})


def test_a_row_without_a_column_is_refused_by_name(runs: dict[str, Path]) -> None:
    row = {name: value for name, value in rows(1)[0].items() if name != "c3"}
    with pytest.raises(DataError, match="c3"):
        pipeline("recommendation", model=runs["wide_deep"])(row)


def test_a_run_knows_its_task(runs: dict[str, Path]) -> None:
    assert recorded_task(runs["wide_deep"]) == "recommendation"
    assert recorded_task(runs["wide_deep"] / "checkpoints" / "step_8") == "recommendation"


@pytest.mark.parametrize("family", ["wide_deep", "two_tower", "sasrec"])
def test_a_run_is_evaluated_again_to_the_same_numbers(runs: dict[str, Path], family: str) -> None:
    options = KIT.read_options({"checkpoint": str(runs[family]), "device": "cpu"})
    lines = [json.loads(line) for line in (runs[family] / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    found = evaluate(options, Inputs(train_dataset=rows_of(family)))
    for name, value in found.items():
        assert value == pytest.approx(last[name], abs=1e-6)


def test_evaluation_wants_a_model_and_a_folder_that_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(KitforgeError, match="no model to evaluate"):
        evaluate(KIT.read_options({"device": "cpu"}), Inputs())
    with pytest.raises(ModelError, match="no run"):
        evaluate(KIT.read_options({"device": "cpu", "checkpoint": str(tmp_path)}), Inputs())


def test_finetuning_starts_from_rows_and_weights(runs: dict[str, Path], tmp_path: Path) -> None:
    told, _ = run(tmp_path / "more", "wide_deep", {"checkpoint": str(runs["wide_deep"])})
    fresh = [json.loads(line) for line in (runs["wide_deep"] / "metrics.jsonl").read_text().splitlines()]
    first = next(line["loss"] for line in fresh if line["kind"] == "train")
    assert next(line["loss"] for line in told.lines if line["kind"] == "train") < first


def test_a_misspelt_option_of_the_schema_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'group'"):
        ready(tmp_path, "wide_deep", {"data.schema": {"categorical": {"c1": {}}, "gruop": "c4"}})


def test_the_report_shows_the_tables(runs: dict[str, Path]) -> None:
    page = (runs["wide_deep"] / "report.html").read_text()
    assert "lookups by tier" in page
    assert "hit rate by device tier size" in page
