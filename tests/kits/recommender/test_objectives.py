"""The objectives of families that find items, against their formulas written out."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from kitforge.core.parallel.world import World
from kitforge.data.schedule import BatchSchedule
from kitforge.kits.recommender.batch import IdSequence
from kitforge.kits.recommender.item_catalog import build_item_catalog
from kitforge.kits.recommender.model import inputs_of
from kitforge.kits.recommender.sequential_objective import training_windows
from kitforge.kits.recommender.two_tower_objective import side_vectors
from tests.kits.recommender.runs import FAMILIES, numbers, ready, run, same

WORDS = {"kind": "integer", "encoding": "vocabulary"}
CLICKS: dict[str, Any] = {
    "data.schema": {"label": {"name": "click"}, "categorical": {"user": WORDS, "item": WORDS}},
    "data.eval_fraction": 0.0,
    "model.user": ["user"],
    "model.item": ["item"],
}


def loaded(folder: Path, family: str, choices: dict[str, Any], rows: Any = None) -> tuple[Any, Any, Any]:
    """Model, objective and training rows, with vectors far from zero."""
    assembly, _ = ready(folder, family, {"tables.init_std": 1.0, **choices}, rows)
    model, task = assembly.loop.model, assembly.loop.task
    return model.eval(), task._objective, task._dataset.train  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_that_has_no_rows_evaluates_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    assembly, _ = ready(tmp_path, family, {})
    evaluate = assembly.loop.evaluate
    own = evaluate()
    shards = BatchSchedule.eval_shards
    monkeypatch.setattr(BatchSchedule, "eval_shards", lambda *given: itertools.chain(shards(*given), [np.arange(0)]))
    assert own and evaluate() == own


@pytest.fixture
def sequences(tmp_path: Path) -> tuple[Any, Any, Any]:
    return loaded(tmp_path, "sasrec", {"retrieval.num_negatives": 7})


@torch.no_grad()
def next_loss(model: Any, objective: Any, rows: Any, negatives: torch.Tensor) -> tuple[float, float]:
    """The loss of the kit with these negatives; that of a softmax over all items, whose last item is held out."""
    sequence = rows.batch(np.arange(40)).sequences["items"]
    drawn = dataclasses.replace(objective.read(rows, np.arange(40), slice(0, 40), 3), negatives=negatives)
    part = {**objective.micro_batch(drawn, 0, 40), "step": 3}
    items = objective.item_vectors(model)
    place_of = {int(item): place for place, item in enumerate(objective._catalogue.ids)}
    expected = 0.0
    for ids, length in zip(sequence.ids, sequence.lengths.tolist(), strict=True):
        known = ids[: max(length - 1, 0)].tolist()
        if len(known) < 2:
            continue
        vectors = items[[place_of[item] for item in known[:-1]]].unsqueeze(0)
        states = model.network(vectors, torch.tensor([len(known) - 1]))[0]
        for stop in range(1, len(known)):
            state = states[stop - 1]
            wanted = place_of[known[stop]]
            scores = (items @ state).double()
            others = torch.tensor([place_of[int(item)] for item in negatives if int(item) != known[stop]])
            weight = len(items) / len(negatives)
            total = scores[wanted].exp() + weight * scores[others].exp().sum()
            expected += float(total.log() - scores[wanted])
    return float(objective.loss(model, part)["loss"]), expected


@torch.no_grad()
def test_with_all_items_the_loss_of_sasrec_is_the_full_softmax(sequences: tuple[Any, Any, Any]) -> None:
    model, objective, rows = sequences
    found, expected = next_loss(model, objective, rows, torch.from_numpy(objective._catalogue.ids))
    assert found == pytest.approx(expected, rel=1e-5)
    items = objective.item_vectors(model)
    # The same by torch's own softmax, for the first sequence that asks for anything.
    sequence = rows.batch(np.arange(40)).sequences["items"]
    row = int((sequence.lengths >= 3).nonzero()[0])
    one = type(sequence)(ids=sequence.ids[row : row + 1, :3], lengths=torch.tensor([3]))
    windows, _ = training_windows(one, 12, np.zeros(1, np.int64))
    drawn = dataclasses.replace(objective.read(rows, np.arange(1), slice(0, 1), 0), windows=windows)
    drawn = dataclasses.replace(drawn, negatives=torch.from_numpy(objective._catalogue.ids))
    part = objective.micro_batch(drawn, 0, 1)
    places = objective._catalogue.indices_of(one.ids[0])
    state = model.network(items[places[:1]].unsqueeze(0), torch.tensor([1]))[0, -1:]
    full = functional.cross_entropy(state @ items.t(), torch.tensor([places[1]]))
    assert float(objective.loss(model, {**part, "step": 0})["loss"]) == pytest.approx(float(full), rel=1e-5)


def test_drawn_items_stand_for_all_others(sequences: tuple[Any, Any, Any]) -> None:
    model, objective, rows = sequences
    # One of them twice, as a draw with replacement may give it.
    drawn = torch.from_numpy(objective._catalogue.ids[[0, 4, 4, 9, 17]])
    found, expected = next_loss(model, objective, rows, drawn)
    assert found == pytest.approx(expected, rel=1e-5)


def test_negatives_are_drawn_anew_for_every_step_and_alike_on_all_ranks(sequences: tuple[Any, Any, Any]) -> None:
    _, objective, rows = sequences
    draws = [objective.read(rows, np.arange(20), slice(0, 20), step).negatives.tolist() for step in range(6)]
    assert len(set(map(tuple, draws))) == 6
    assert objective.read(rows, np.arange(20), slice(12, 20), 2).negatives.tolist() == draws[2]


def test_items_that_are_held_out_are_not_counted(tmp_path: Path) -> None:
    rows = [{"items": [1, 2, 3]}, {"items": [2, 9]}, {"items": [7]}, {"items": []}, {"items": [1, 1, 2]}]
    schema = {"data.schema": {"sequences": {"items": WORDS}}}
    _, _, train = loaded(tmp_path, "sasrec", schema, rows)
    found = build_item_catalog(train, "items", 1)
    assert dict(zip(found.keys.tolist(), found.counts.tolist(), strict=True)) == {1: 3, 2: 2}


ROWS = [
    {"click": int(n % 4 != 3), "user": n % 5, "item": item}
    for n, item in enumerate([3, 3, 5, 8, 3, 5, 9, 9, 3, 8, 5, 3])
]


@torch.no_grad()
def test_the_loss_of_two_towers_is_the_corrected_softmax_over_the_batch(tmp_path: Path) -> None:
    model, objective, rows = loaded(tmp_path, "two_tower", CLICKS, ROWS)
    indices = np.arange(len(ROWS))
    batch = rows.batch(indices)
    vectors = {
        side: side_vectors(model, side, inputs_of(batch, model.requests), None).double() for side in ("user", "item")
    }
    counts = {item: sum(row["item"] == item for row in ROWS) for item in (3, 5, 8, 9)}
    expected = 0.0
    for place, row in enumerate(ROWS):
        if not row["click"]:
            continue
        total = 0.0
        for other, candidate in enumerate(ROWS):
            # Another row with the user's own item is not a wrong answer.
            if other != place and candidate["item"] == row["item"]:
                continue
            score = float(vectors["user"][place] @ vectors["item"][other]) / 0.1
            total += math.exp(score - math.log(counts[candidate["item"]] / len(ROWS)))
        own = float(vectors["user"][place] @ vectors["item"][place]) / 0.1
        expected += math.log(total) - own + math.log(counts[row["item"]] / len(ROWS))
    read = objective.read(rows, indices, slice(0, len(ROWS)), 0)
    part = {**objective.micro_batch(read, 0, len(ROWS)), "step": 0}
    assert objective.count(part) == 9
    assert float(objective.loss(model, part)["loss"]) == pytest.approx(expected, rel=1e-5)


def test_rows_without_a_click_look_for_nothing(tmp_path: Path) -> None:
    model, objective, rows = loaded(tmp_path, "two_tower", CLICKS, ROWS)
    with torch.no_grad():
        found = objective.evaluate(model, rows, [np.arange(12)], World(device=torch.device("cpu")))
        users, items = objective.user_vectors(model, rows.batch(np.arange(12))), objective.item_vectors(model)
    scores = (users @ items.t()).numpy()
    hits = []
    for place, row in enumerate(ROWS):
        if row["click"]:
            wanted = int(objective._catalogue.indices_of(rows.batch(np.array([place])).ids["item"])[0])
            hits.append(int((scores[place] >= scores[place, wanted]).sum() == 1))
    assert found["hr@1"] == pytest.approx(np.mean(hits))


@pytest.mark.parametrize("window", [1, 3, 4, 30])
def test_windows_ask_for_each_item_but_the_first_once_after_those_before_it(window: int) -> None:
    lengths = torch.arange(18)
    ids = 100 * lengths.unsqueeze(1) + torch.arange(17)
    cuts = np.random.default_rng(0).integers(0, window, 18)
    windows, owners = training_windows(IdSequence(ids=ids, lengths=lengths), window, cuts)
    asked: dict[int, list[int]] = {row: [] for row in range(18)}
    for found, length, owner in zip(windows.ids.tolist(), windows.lengths.tolist(), owners.tolist(), strict=True):
        assert found[length:] == [0] * (len(found) - length)
        assert length <= window + 1
        assert found[:length] == list(range(found[0], found[0] + length)) if length else True
        asked[owner] += found[1:length]
    for row, items in asked.items():
        # The last item is held out.
        assert items == list(range(100 * row + 1, 100 * row + max(row - 1, 0)))
    assert torch.bincount(owners, minlength=18)[: window + 3].tolist() == [1] * min(window + 3, 18)


def test_histories_longer_than_the_network_reads_are_trained_on_whole(tmp_path: Path) -> None:
    rows = [{"items": [(start + place) % 30 for place in range(9)]} for start in range(40)]
    _, objective, train = loaded(tmp_path, "sasrec", {"model.max_length": 3}, rows)
    first, second = (objective.read(train, np.arange(40), slice(0, 40), step) for step in (0, 1))
    assert objective.count({"lengths": first.windows.lengths}) == 40 * 7
    assert not torch.equal(first.windows.ids, second.windows.ids)
    own = objective.read(train, np.arange(40), slice(10, 20), 0)
    assert torch.equal(own.windows.ids, first.windows.ids[first.starts[10] : first.starts[20]])


@pytest.mark.slow
def test_windows_are_the_same_on_resume_and_in_micro_batches(tmp_path: Path) -> None:
    choices = {"model.max_length": 3, "trainer.checkpoint_every": 2, "data.batch_size": 16, "model.dropout": 0.3}
    whole, one = run(tmp_path / "whole", "sasrec", choices)
    start, _ = run(tmp_path / "parts", "sasrec", choices, stop_at=3)
    rest, two = run(tmp_path / "parts", "sasrec", {**choices, "resume": "auto"})
    assert numbers(start, "loss") + numbers(rest, "loss") == numbers(whole, "loss")
    assert same(one, two)
    parts, _ = run(tmp_path / "micro", "sasrec", {**choices, "trainer.micro_batch_size": 5})
    assert numbers(parts, "loss") == pytest.approx(numbers(whole, "loss"), abs=2e-6)
    assert numbers(parts, "eval/hr@10") == numbers(whole, "eval/hr@10")
