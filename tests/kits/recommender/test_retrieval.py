"""Items that are found: told apart, missed where training never saw them, measured in blocks, searched thoroughly."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kitforge.api import load_model, load_processor, pipeline
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.kits.recommender import metrics as recommender_metrics
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.item_catalog import ItemCatalog
from kitforge.kits.recommender.metrics import RankingMetrics, rank_users, ranks_without, target_ranks
from kitforge.kits.recommender.pipeline import build_index, index_recall, set_search
from kitforge.trainer.run_folder import train
from tests.kits.recommender.runs import ready, run
from tests.kits.recommender.test_objectives import CLICKS, WORDS

KIT = TASKS["recommendation"]

EVAL = [{"click": 1, "user": n % 4, "item": n % 6} for n in range(12)]


def train_rows() -> list[dict[str, Any]]:
    """Item 0 is taken twice as often as any other, and items 4 and 5 never."""
    return [{"click": 1, "user": n % 4, "item": max(n % 5 - 1, 0)} for n in range(200)]


def test_an_item_that_training_never_saw_is_a_miss_and_told(tmp_path: Path) -> None:
    assembly, _ = ready(tmp_path, "two_tower", {**CLICKS, "retrieval.top_k": 4, "data.eval": None}, train_rows())
    objective, model = assembly.loop.task._objective, assembly.loop.model.eval()  # type: ignore[attr-defined]
    rows = assembly.loop.task._dataset.train  # type: ignore[attr-defined]
    with torch.no_grad():
        whole = objective.evaluate(model, rows, [np.arange(200)], World(device=torch.device("cpu")))
    assert (whole["cold_share"], whole["hr@4"], whole["popularity_hr@4"]) == (0.0, 1.0, 1.0)
    found = load_dataset(None, EVAL, assembly.options.data, 0, rows.encoder).eval
    with torch.no_grad():
        some = objective.evaluate(model, found, [np.arange(12)], World(device=torch.device("cpu")))
    # Of the four items that there are all are among the first four, and of six two were never seen.
    assert some["cold_share"] == pytest.approx(1 / 3)
    assert some["hr@4"] == pytest.approx(2 / 3) and some["mrr"] < 2 / 3
    assert some["popularity_hr@4"] == pytest.approx(2 / 3)


def test_equally_popular_items_keep_their_order() -> None:
    counts, ids = np.random.default_rng(0).integers(0, 3, 500), np.arange(500)
    ranks = ItemCatalog(ids=ids, keys=ids, counts=counts).popularity_ranks()
    assert (ranks + 1).tolist() == pd.Series(counts).rank(method="first", ascending=False).tolist()


def test_popularity_ranks_items_by_how_often_they_were_taken(tmp_path: Path) -> None:
    assembly, _ = ready(tmp_path, "two_tower", {**CLICKS, "retrieval.top_k": 1}, train_rows())
    task: Any = assembly.loop.task
    with torch.no_grad():
        found = task._objective.evaluate(
            assembly.loop.model.eval(), task._dataset.train, [np.arange(200)], World(device=torch.device("cpu"))
        )
    assert found["popularity_hr@1"] == pytest.approx(0.4)


@pytest.mark.parametrize("family", ["two_tower", "sasrec"])
def test_items_are_never_merged_by_hash(tmp_path: Path, family: str) -> None:
    hashed = {"kind": "integer", "num_buckets": 50}
    if family == "two_tower":
        choices = {
            **CLICKS,
            "data.schema": {"label": {"name": "click"}, "categorical": {"user": WORDS, "item": hashed}},
        }
        rows: Any = train_rows()
    else:
        choices, rows = {"data.schema": {"sequences": {"items": hashed}}}, None
    with pytest.raises(ConfigError, match=r"encoding[^$]*hash[^$]*exact or vocabulary"):
        ready(tmp_path, family, choices, rows)


def test_a_guessed_schema_keeps_any_number_of_items_apart(tmp_path: Path) -> None:
    rows = [{"click": n % 2, "user": n % 40, "item_id": f"film {n}"} for n in range(1500)] * 2
    choices = {"model.user": ["user"], "model.item": ["item_id"], "data.eval_fraction": 0.0}
    assembly, _ = ready(tmp_path, "two_tower", choices, rows)
    assert len(assembly.loop.model.item_catalog) == 1500  # type: ignore[arg-type]


def test_values_that_a_vocabulary_leaves_out_are_no_item(tmp_path: Path) -> None:
    rows = [{"click": 1, "user": n % 4, "item": n % 5 if n < 100 else n} for n in range(110)]
    schema = {"label": {"name": "click"}, "categorical": {"user": WORDS, "item": WORDS | {"min_count": 2}}}
    assembly, _ = ready(tmp_path, "two_tower", {**CLICKS, "data.schema": schema}, rows)
    assert sorted(assembly.loop.model.item_catalog.keys.tolist()) == [0, 1, 2, 3, 4]  # type: ignore[union-attr]


def test_users_are_ranked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.randn(37, 11, generator=torch.Generator().manual_seed(0))
    targets = np.arange(37) % 11
    asked: list[int] = []

    def scores_of(block: slice) -> torch.Tensor:
        asked.append(len(scores[block]))
        return scores[block]

    monkeypatch.setattr(recommender_metrics, "_SCORES_AT_ONCE", 60)
    ranks, loss = rank_users(scores_of, targets, 11)
    assert max(asked) == 5 and sum(asked) == 37
    np.testing.assert_array_equal(ranks, target_ranks(scores.double().numpy(), targets))
    expected = torch.nn.functional.cross_entropy(scores.double(), torch.from_numpy(targets), reduction="sum")
    assert loss == pytest.approx(float(expected), rel=1e-12)
    metrics = RankingMetrics()
    metrics.add(ranks)
    metrics.merge(np.zeros(0, np.int64), num_cold=37)
    assert metrics.result()["cold_share"] == 0.5


def test_a_search_may_be_more_thorough_and_its_recall_is_measured() -> None:
    vectors = torch.nn.functional.normalize(torch.randn(2000, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    retrieval = KIT.read_options({"retrieval": {"index": "IVF32,Flat"}}).retrieval
    index = build_index(vectors, retrieval.index)
    narrow = index_recall(index, vectors, 10)
    set_search(index, KIT.read_options({"retrieval": {"index": "IVF32,Flat", "nprobe": 32}}).retrieval)
    assert narrow < 0.9 and index_recall(index, vectors, 10) == 1.0
    graph = build_index(vectors, "HNSW8")
    set_search(graph, KIT.read_options({"retrieval": {"index": "HNSW8", "ef_search": 500}}).retrieval)
    assert index_recall(graph, vectors, 10) > 0.95
    with pytest.raises(ConfigError, match=r"has no nprobe[^$]*retrieval\.nprobe=4"):
        set_search(build_index(vectors, "Flat"), KIT.read_options({"retrieval": {"nprobe": 4}}).retrieval)


def test_a_user_is_asked_for_its_own_columns_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    schema = {
        "label": {"name": "click"},
        "numeric": {"age": {"indicator": True}, "price": {}},
        "categorical": {"user": WORDS, "item": WORDS | {"missing": "error"}},
        "bags": {"tags": WORDS},
        "group": "item",
        "group_kind": "integer",
    }
    rows = [{**row, "age": float(n % 7), "price": n / 3, "tags": [n % 3]} for n, row in enumerate(train_rows())]
    choices = {**CLICKS, "data.schema": schema, "model.user": ["user", "age", "age is missing"]}
    assembly, _ = ready(tmp_path, "two_tower", choices, rows)
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    model, encoder = load_model(tmp_path), load_processor(tmp_path)
    find = KIT.open_pipeline(model, encoder, KIT.read_options({"retrieval": {"index": "IVF2,Flat"}}))
    with caplog.at_level(logging.INFO):
        few = find.retrieve({"user": 3, "age": 2.0}, k=2)
    assert "recall@10 of the index IVF2,Flat" in caplog.text
    assert few == find.retrieve({**rows[0], "user": 3, "age": 2.0}, k=2) and len(few) == 2
    with pytest.raises(DataError, match="no column 'age'"):
        find.retrieve({"user": 3})


@pytest.mark.parametrize("block", [1, 2**24])
def test_items_already_taken_can_be_left_out_of_the_ranks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(recommender_metrics, "_SCORES_AT_ONCE", block)
    generator = torch.Generator().manual_seed(0)
    scores, targets = torch.randn(40, 11, generator=generator), np.arange(40) % 11
    seen = torch.randint(-1, 11, (40, 6), generator=generator).numpy()
    ranks, loss = rank_users(lambda block: scores[block], targets, 11, seen)
    popularity = np.random.default_rng(0).permutation(11)
    popular = ranks_without(popularity, targets, seen)
    for user, target in enumerate(targets):
        left = [item for item in range(11) if item == target or item not in seen[user]]
        assert ranks[user] == sum(scores[user, item] > scores[user, target] for item in left)
        assert popular[user] == sum(popularity[item] < popularity[target] for item in left)
    plain, same_loss = rank_users(lambda block: scores[block], targets, 11)
    assert (plain >= ranks).all() and (plain > ranks).any() and same_loss == loss
    assert ranks_without(popularity, targets, None).tolist() == popularity[targets].tolist()


def taken(first: int, kind: str = "integer") -> list[dict[str, Any]]:
    """Ten items from `first` on, each taken by the users of its own; the price of an item rises with its rows."""
    rows = [{"user": n % 10, "item": first + n % 10, "price": float(n // 10 + first)} for n in range(200)]
    return rows if kind == "integer" else [row | {"item": f"film {row['item']}"} for row in rows]


def growing(kind: str, encoding: str) -> dict[str, Any]:
    item = {"kind": kind, "encoding": encoding}
    schema = {"categorical": {"user": WORDS, "item": item}, "numeric": {"price": {"standardize": False}}}
    towers = {"model.user": ["user"], "model.item": ["item", "price"], "model.dropout": 0.0}
    return {**towers, "data.schema": schema, "data.eval_fraction": 0.0, "trainer.max_steps": 2}


@pytest.mark.parametrize("kind", ["integer", "text"])
def test_items_of_later_rows_are_found_beside_those_of_a_run(tmp_path: Path, kind: str) -> None:
    choices = growing(kind, "exact")
    run(tmp_path / "day 1", "two_tower", choices, rows=taken(0, kind))
    tuned = {"checkpoint": str(tmp_path / "day 1"), "data.eval_fraction": 0.0, "trainer.max_steps": 2}
    run(tmp_path / "day 2", "two_tower", tuned, rows=taken(5, kind))
    items = pipeline("recommendation", str(tmp_path / "day 2"), options={"device": "cpu"})
    names = [row["item"] for row in items.retrieve([{"user": 3}], k=100)[0]]
    assert sorted(names, key=str) == sorted({row["item"] for row in taken(0, kind) + taken(5, kind)}, key=str)
    catalogue = items.model.item_catalog
    found = {catalogue.item(n): (catalogue.counts[n], catalogue.samples.dense[n, 0]) for n in range(len(catalogue))}
    first, both, last = (found[each if kind == "integer" else f"film {each}"] for each in (1, 7, 12))
    # Counted over both, with the price of the newest row.
    assert (first, both, last) == ((20, 19.0), (40, 24.0), (20, 24.0))


def test_an_earlier_checkpoint_keeps_its_items(tmp_path: Path) -> None:
    choices = {**growing("integer", "exact"), "trainer.save_total_limit": 9}
    run(tmp_path, "two_tower", choices, rows=taken(0))
    on = {**choices, "resume": "auto", "trainer.allow_data_changes": True, "trainer.allow_config_changes": True}
    run(tmp_path, "two_tower", {**on, "trainer.max_steps": 4}, rows=taken(0) + taken(10))
    run(tmp_path, "two_tower", {**on, "trainer.max_steps": 6}, rows=taken(0) + taken(10))
    run(tmp_path, "two_tower", {**on, "trainer.max_steps": 8}, rows=taken(20))
    steps = [load_model(tmp_path / "checkpoints" / f"step_{step}").item_catalog for step in (2, 4, 6, 8)]
    assert [each.ids.tolist() for each in steps] == [list(range(size)) for size in (10, 20, 20, 30)]
    assert len(list(tmp_path.glob("items_after_*"))) == 2
    assert len(load_model(tmp_path).item_catalog) == 30


def test_a_vocabulary_keeps_its_items_and_says_which_it_cannot_learn(tmp_path: Path) -> None:
    choices = growing("text", "vocabulary")
    run(tmp_path / "day 1", "two_tower", choices, rows=taken(0, "text"))
    tuned = {"checkpoint": str(tmp_path / "day 1"), "data.eval_fraction": 0.0, "trainer.max_steps": 2}
    told, _ = run(tmp_path / "day 2", "two_tower", tuned, rows=taken(5, "text"))
    (words,) = [line["message"] for line in told.lines if line.get("event") == "unlearned"]
    assert "5 values of 'item' in 100 places" in words
    assert len(load_model(tmp_path / "day 2").item_catalog) == 10


def test_the_newest_row_of_an_item_is_told_by_its_time(tmp_path: Path) -> None:
    rows = [{"user": n % 4, "item": n % 5, "price": float(n), "day": 40 - n} for n in range(40)]
    choices = growing("integer", "exact") | {"data.eval_fraction": 0.1, "data.split": "time", "data.time_column": "day"}
    assembly, _ = ready(tmp_path, "two_tower", choices, rows)
    samples = assembly.loop.model.item_catalog.samples  # type: ignore[union-attr]
    # The four newest are held out.
    assert samples.dense[:, 0].tolist() == [5.0, 6.0, 7.0, 8.0, 4.0]
