"""Rows that are all positive train a ranker with items drawn beside them: exactly again, and none that was taken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kitforge.composition import compose_config
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tables.columns import NamedColumns
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.build import TASKS, Inputs
from kitforge.kits.recommender.config import NegativeOptions, RecommendationDataOptions
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.negatives import ClickRows, NegativeSampler
from kitforge.kits.recommender.schema import read_schema
from kitforge.trainer.run_folder import train
from tests.distributed.training import TestRendezvous
from tests.kits.recommender.runs import FAMILIES, OPTIONS, numbers, ready, same, state_of

KIT = TASKS["recommendation"]

ITEM = {"kind": "integer", "encoding": "vocabulary"}
SCHEMA: dict[str, Any] = {
    "events": {"user": "user", "item": "item", "time": "time", "history": "before", "history_length": 4},
    "categorical": {"user": ITEM, "item": {**ITEM, "table": "items"}, "kind": {}},
    "crosses": {"user_x_item": {"of": ["user", "item"], "num_buckets": 100_000}},
    "sequences": {"before": {**ITEM, "table": "items"}},
}


def events(users: int = 80) -> list[dict[str, Any]]:
    """Even users take even items, odd ones odd items; small numbers more often."""
    generator = np.random.default_rng(0)
    chances = np.array([4.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5])
    rows = []
    for user in range(users):
        picked = generator.choice(7, 5, replace=False, p=chances / chances.sum()) * 2 + user % 2
        rows += [
            {"user": user, "item": int(item), "kind": f"k{item // 2}", "time": 100 * place + user}
            for place, item in enumerate(picked)
        ]
    return rows


def options(**negatives: Any) -> RecommendationDataOptions:
    given = NegativeOptions(**{"num_negatives": 3, "item_features": ("kind",), **negatives})
    return RecommendationDataOptions(schema=SCHEMA, negatives=given, eval_fraction=0.2)


def drawn(
    rows: list[dict[str, Any]], own: slice = slice(0, 10**6), step: int = 0, **negatives: Any
) -> tuple[NamedColumns, ClickRows]:
    """All training rows of a step with their negatives, and what was read of the positives."""
    data = options(**negatives)
    dataset = load_dataset(rows, rows[:5], data, 0, None)
    sampler = NegativeSampler(data.negatives, dataset.encoder.schema, 0, dataset.train_rows())
    indices = np.arange(dataset.train_rows().num_rows)
    return dataset.train_rows().columns(indices), sampler.training_rows(dataset.train_rows(), indices, own, step)


def items_of(found: ClickRows) -> NDArray[np.int64]:
    return found.batch.ids["item"].numpy()


def test_no_negative_is_an_item_that_the_user_has_taken() -> None:
    rows = events()
    _, found = drawn(rows)
    users, items = found.batch.ids["user"].tolist(), found.batch.ids["item"].tolist()
    labels = found.batch.labels
    assert labels is not None
    positives = {pair for pair, label in zip(zip(users, items, strict=True), labels.tolist(), strict=True) if label}
    negatives = [pair for pair, label in zip(zip(users, items, strict=True), labels.tolist(), strict=True) if not label]
    assert len(positives) == len(rows)
    assert len(negatives) == 3 * len(rows)
    assert not positives & set(negatives)
    assert found.starts.tolist() == list(range(0, 4 * len(rows) + 1, 4))
    assert found.positions.tolist() == [0, 1, 2, 3] * len(rows)
    _, loose = drawn(rows, exclude_seen=False)
    again = zip(loose.batch.ids["user"].tolist(), loose.batch.ids["item"].tolist(), strict=True)
    own = np.repeat(items_of(loose)[::4], 4).reshape(-1, 4)[:, 1:]
    assert positives & {pair for pair, place in zip(again, loose.positions.tolist(), strict=True) if place}
    assert not (items_of(loose).reshape(-1, 4)[:, 1:] == own).any()


def test_what_belongs_to_the_item_comes_with_it() -> None:
    _, found = drawn(events())
    kinds, items = found.batch.ids["kind"].numpy(), items_of(found)
    assert all(len(set(kinds[items == item].tolist())) == 1 for item in np.unique(items))
    pairs = np.stack([found.batch.ids["user"].numpy(), items], 1)
    crosses = found.batch.ids["user_x_item"].numpy()
    by_pair = {tuple(pair): cross for pair, cross in zip(pairs.tolist(), crosses.tolist(), strict=True)}
    assert all(by_pair[tuple(pair)] == cross for pair, cross in zip(pairs.tolist(), crosses.tolist(), strict=True))
    assert len(set(by_pair.values())) > 0.98 * len(by_pair)
    histories = found.batch.sequences["before"].ids.reshape(-1, 4, 50)
    assert torch.equal(histories, histories[:, :1].expand(-1, 4, -1))


@pytest.mark.parametrize("sampling", ["uniform", "popularity"])
def test_items_are_drawn_as_often_as_the_rule_says(sampling: str) -> None:
    rows = [
        {"user": user, "item": item, "kind": "", "time": item} for item in range(4) for user in range(10 * item + 1)
    ]
    rows += [{"user": 1000 + number, "item": 9, "kind": "", "time": 0} for number in range(2000)]
    columns, found = drawn(rows, negative_sampling=sampling)
    is_last = np.repeat(columns.keys("item")[0] == 9, 4)
    keys = np.array([0, 1, 2, 3])
    ids = load_dataset(rows, rows[:5], options(), 0, None).encoder.ids_of("item", keys)
    counts = np.array([((items_of(found) == item) & is_last).sum() for item in ids])
    weights = np.ones(4) if sampling == "uniform" else 10.0 * keys + 1
    expected = 6000 * weights / weights.sum()
    assert counts.sum() == 6000
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all(), counts


def test_what_is_drawn_depends_on_seed_step_and_place_alone() -> None:
    rows = events()
    _, whole = drawn(rows)
    _, later = drawn(rows, step=1)
    assert not torch.equal(whole.batch.ids["item"], later.batch.ids["item"])
    _, own = drawn(rows, slice(100, 150))
    assert torch.equal(own.batch.ids["item"], whole.batch.ids["item"][400:600])


def test_who_has_taken_all_but_one_item_gets_that_one_and_who_has_taken_all_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [{"user": user, "item": item, "kind": "", "time": item} for user in (0, 1) for item in range(200)]
    rows = [row for row in rows if (row["user"], row["item"]) != (0, 77)]
    columns, found = drawn(rows)
    users = columns.keys("user")[0]
    sizes = found.starts.diff().numpy()
    assert (sizes[users == 0] == 4).all()
    assert (sizes[users == 1] == 1).all()
    (item,) = set(items_of(found)[found.positions.numpy() > 0].tolist())
    assert item == load_dataset(rows, rows[:5], options(), 0, None).encoder.ids_of("item", np.array([77]))[0]
    assert "have taken all other items" in caplog.text


def test_values_are_replaced_in_columns_of_every_sort() -> None:
    schema = {"numeric": {"n": {}}, "categorical": {"k": ITEM}, "bags": {"b": ITEM}}
    rows = [{"n": float(place), "k": place, "b": list(range(place + 1))} for place in range(4)]
    columns = (
        load_dataset(rows, rows, RecommendationDataOptions(schema=schema), 0, None).train_rows().columns(np.arange(3))
    )
    changed = columns.replaced(np.array([0, 2]), columns.select(("n", "k", "b")), np.array([2, 1]))
    assert changed.numbers("n").tolist() == [2.0, 1.0, 1.0]
    assert changed.keys("k")[0].tolist() == [2, 1, 1]
    assert changed.lists("b").lengths.tolist() == [3, 2, 2]
    assert changed.lists("b").values.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert columns.lists("b").lengths.tolist() == [1, 2, 3]


def choices(**more: Any) -> dict[str, Any]:
    given = {"data.schema": SCHEMA, "data.negatives.num_negatives": 2, "data.negatives.item_features": ["kind"]}
    return {**given, "data.batch_size": 40, "trainer.checkpoint_every": 2, "trainer.max_steps": 6, **more}


def trained(folder: Path, stop_at: int | None = None, rows: Any = None, **more: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    assembly, told = ready(folder, "din", choices(**more), events() if rows is None else rows)
    told.stop_at = stop_at
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return told, assembly


@pytest.mark.slow
def test_a_click_model_learns_from_positives_alone(tmp_path: Path) -> None:
    more = {"trainer.max_steps": 60, "tables.deep.learning_rate": 0.05, "data.batch_size": 100}
    told, _ = trained(tmp_path / "run", rows=events(300), **more)
    # Whose items are even and whose odd is all that tells a positive from a negative, but for what is popular.
    assert told.lines[-1]["eval/auc"] > 0.8
    # The first logit is right about one positive in three rows.
    assert numbers(told, "loss")[0] == pytest.approx(-np.log(1 / 3) / 3 - np.log(2 / 3) * 2 / 3, abs=0.03)


@pytest.mark.slow
def test_a_run_that_is_resumed_or_cut_otherwise_draws_the_same(tmp_path: Path) -> None:
    whole, one = trained(tmp_path / "whole")
    first, _ = trained(tmp_path / "parts", stop_at=2)
    second, two = trained(tmp_path / "parts", resume="auto")
    assert numbers(first, "loss") + numbers(second, "loss") == numbers(whole, "loss")
    assert numbers(second, "eval/auc")[-1] == numbers(whole, "eval/auc")[-1]
    assert same(state_of(one), state_of(two))
    parts, _ = trained(tmp_path / "micro", **{"trainer.micro_batch_size": 7})
    assert numbers(parts, "loss") == pytest.approx(numbers(whole, "loss"), abs=2e-6)
    assert numbers(parts, "eval/auc") == pytest.approx(numbers(whole, "eval/auc"), abs=1e-6)


def test_a_run_is_evaluated_again_on_the_same_negatives(tmp_path: Path) -> None:
    def written(name: str, rows: list[dict[str, Any]]) -> str:
        path = tmp_path / name
        path.write_text("\n".join(["user,item,kind,time", *(",".join(map(str, row.values())) for row in rows)]))
        return str(path)

    rows = events()
    given = {"data.eval": written("eval.csv", rows[300:]), "data.train": written("train.csv", rows[:300])}
    given |= {"data.cache": str(tmp_path / "cache")}
    torch.set_num_threads(1)
    values = compose_config(
        "recommendation", {"model": "din", **OPTIONS, **FAMILIES["din"], **choices(), **given}
    ).values
    options = KIT.read_options({**values, "output_dir": str(tmp_path / "run")})
    assembly = KIT.assemble(options, Inputs(), TestRendezvous(ParallelConfig()))
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    asked = {"task": "recommendation", "checkpoint": str(tmp_path / "run"), "device": "cpu"}
    found = [
        KIT.evaluate(KIT.read_options({**asked, **data}), Inputs(), TestRendezvous(ParallelConfig()))
        for data in ({}, {"data": {"eval": given["data.eval"], "cache": given["data.cache"]}})
    ]
    assert found[0] == found[1]
    assert 0 < found[0]["eval/auc"] < 1


@pytest.mark.slow
def test_a_stream_draws_from_the_items_of_the_step(tmp_path: Path) -> None:
    schema = {"group": "user", "group_kind": "integer", **{name: SCHEMA[name] for name in ("categorical", "sequences")}}
    schema["categorical"] = {name: {**each, "encoding": "exact"} for name, each in schema["categorical"].items()}
    schema["sequences"] = {"before": {**ITEM, "encoding": "exact", "table": "items"}}
    rows = [{**row, "before": [row["item"] ^ 2]} for row in events()]
    more = {"data.schema": schema, "data.negatives.item": "item", "data.num_fit_rows": 40}
    whole, one = trained(tmp_path / "whole", rows=iter(rows), **more)
    first, _ = trained(tmp_path / "parts", stop_at=3, rows=(source := iter(rows)), **more)
    second, two = trained(tmp_path / "parts", rows=source, resume="auto", **more)
    assert numbers(first, "loss") + numbers(second, "loss") == numbers(whole, "loss")
    assert same(state_of(one), state_of(two))
    sampler = one.loop.task._objective._negatives
    batch = load_dataset(rows, rows, RecommendationDataOptions(schema=schema), 0, None).train_rows()
    found = sampler.training_rows(batch, np.arange(40), slice(0, 40), 0)
    items, users = items_of(found).reshape(-1, 3), found.batch.ids["user"].numpy()[::3]
    assert set(items[:, 1:].flatten().tolist()) <= set(items[:, 0].tolist())
    taken = {
        (user, item) for user, own in zip(users.tolist(), items[:, 0].tolist(), strict=True) for item in (own, own ^ 2)
    }
    drawn = {(user, item) for user, own in zip(users.tolist(), items[:, 1:].tolist(), strict=True) for item in own}
    assert not taken & drawn


def test_what_cannot_be_sampled_is_said(tmp_path: Path) -> None:
    rows = events()
    with pytest.raises(ConfigError, match=r"data\.negatives\.item_features(.|\n)*'color'"):
        drawn(rows, item_features=("color",))
    labelled = {"label": {"name": "time"}, "categorical": {"item": ITEM}}
    with pytest.raises(ConfigError, match="rows have labels of their own"):
        NegativeSampler(NegativeOptions(num_negatives=1), read_schema(labelled), 0, None)
    with pytest.raises(ConfigError, match=r"data\.schema\.group"):
        NegativeSampler(
            NegativeOptions(num_negatives=1, item="item"), read_schema({"categorical": {"item": ITEM}}), 0, None
        )
    with pytest.raises(ConfigError, match="sasrec learns from the other items"):
        ready(tmp_path, "sasrec", {"data.negatives.num_negatives": 2})


def test_events_without_a_schema_become_targets_with_histories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"user_id": row["user"], "item_id": row["item"], "rating": 4, "timestamp": row["time"]} for row in events()]
    caplog.set_level("INFO", logger="kitforge")
    more = {"data.schema": None, "data.negatives.item_features": [], "data.negatives.num_negatives": 2}
    assembly, _ = ready(tmp_path / "run", "din", {**choices(), **more}, rows)
    schema = assembly.processor.schema
    assert list(schema.categorical) == ["user_id", "item_id"]
    assert list(schema.sequences) == ["history"]
    assert schema.group == "user_id"
    assert "left out: rating" in caplog.text
