"""Drawn predictions: the metrics of an evaluation against scikit-learn, seqeval and NumPy, and NaN where there is
nothing to measure."""

import importlib
import math
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from kitforge.core.parallel.world import ALONE
from kitforge.kits.recommender.metrics import (
    ClickMetrics,
    RankingMetrics,
    all_reduce_click_metrics,
    all_reduce_ranking_metrics,
    rank_users,
)
from kitforge.kits.transformers import rows as labelled
from kitforge.kits.transformers.entities import entity_counts, entity_metrics
from tests.differential.drawn import drawn

SCORES = st.integers(-4, 4).map(float) | st.floats(-30, 30)


def close(one: float, other: float) -> bool:
    return math.isnan(one) and math.isnan(other) or math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


@drawn(80)
@given(st.lists(st.tuples(SCORES, st.booleans()), max_size=40), st.integers(1, 3), st.sampled_from([0, 1]))
def test_clicks_are_measured_as_by_scikit_learn(rows: list[tuple[float, bool]], parts: int, num_broken: int) -> None:
    logits, labels = np.array([row[0] for row in rows]), np.array([row[1] for row in rows], float)
    measured = ClickMetrics()
    for part in range(parts):
        measured.add(logits[part::parts], labels[part::parts])
    found = all_reduce_click_metrics(measured, ALONE)
    one_class = len(set(labels.tolist())) < 2
    assert close(found["auc"], math.nan if one_class else theirs.roc_auc_score(labels, logits))
    # In float64, as the loss of a logit beyond 36 is not that of a rounded probability.
    loss = torch.nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(logits), torch.from_numpy(labels))
    assert close(found["log_loss"], float(loss))
    if num_broken:
        measured.add(np.array([math.nan]), np.zeros(1))
        assert all(map(math.isnan, all_reduce_click_metrics(measured, ALONE).values()))


@drawn(80)
@given(st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), max_size=8), st.data())
def test_found_items_are_measured_as_by_scikit_learn(users: list[list[int]], data: st.DataObject) -> None:
    scores = np.array(users, float).reshape(-1, 6)
    targets = np.array(data.draw(st.lists(st.integers(0, 5), min_size=len(users), max_size=len(users))), np.int64)
    num_cold = data.draw(st.integers(0, 2))
    measured = RankingMetrics((1, 3))
    ranks, loss = rank_users(lambda block: torch.from_numpy(scores[block]), targets, 6)
    measured.add(ranks)
    measured.num_cold = num_cold
    found = all_reduce_ranking_metrics(measured, loss, ALONE)
    total, wanted = len(users) + num_cold, {"mrr": 0.0, "hr@1": 0.0, "hr@3": 0.0, "ndcg@1": 0.0, "ndcg@3": 0.0}
    if users:
        relevant = np.eye(6)[targets]
        # A tie counts against the target.
        below = scores - relevant / 2
        wanted["mrr"] = theirs.label_ranking_average_precision_score(relevant, below) * len(users)
        for cut in (1, 3):
            wanted[f"hr@{cut}"] = theirs.top_k_accuracy_score(targets, below, k=cut, labels=range(6), normalize=False)
            wanted[f"ndcg@{cut}"] = theirs.ndcg_score(relevant, below, k=cut) * len(users)
    assert all(close(found[name], value / total if total else math.nan) for name, value in wanted.items())
    losses = (
        theirs.log_loss(targets, torch.from_numpy(scores).softmax(1).numpy(), labels=range(6)) if users else math.nan
    )
    assert close(found["loss"], losses)
    if users:
        ranks, _ = rank_users(lambda block: torch.full_like(torch.from_numpy(scores[block]), math.nan), targets, 6)
        measured.add(ranks)
        assert math.isnan(measured.result()["mrr"])


@drawn(80)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_labels_are_measured_as_by_scikit_learn(rows: list[tuple[int, int]]) -> None:
    confusion = torch.zeros(4, 4, dtype=torch.float64)
    for label, prediction in rows:
        confusion[label, prediction] += 1
    found = labelled.metrics_of(torch.tensor(float(2 * len(rows))), confusion)
    if not rows:
        assert all(map(math.isnan, found.values()))
        return
    labels, predictions = zip(*rows, strict=True)
    assert close(found["accuracy"], theirs.accuracy_score(labels, predictions))
    assert close(found["f1"], theirs.f1_score(labels, predictions, average="macro")) and found["loss"] == 2


@drawn(80)
@given(st.lists(st.tuples(*[st.booleans()] * 6, st.sampled_from([0.0, 1.0])), max_size=20))
def test_several_labels_are_measured_as_by_scikit_learn(rows: list[Any]) -> None:
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 7)
    labels, logits, weights = table[:, :3], table[:, 3:6] - 0.5, table[:, 6]
    found = labelled._metrics_of_several(weights.sum(), labelled._counts_of(logits, labels, weights))
    kept = weights > 0
    wanted, predicted = labels[kept].numpy(), (logits[kept] > 0).double().numpy()
    used = np.flatnonzero(wanted.any(0) | predicted.any(0))
    assert close(found["accuracy"], theirs.accuracy_score(wanted, predicted) if len(wanted) else math.nan)
    f1 = [theirs.f1_score(wanted[:, label], predicted[:, label], zero_division=0) for label in used] or [math.nan]
    assert close(found["f1"], float(np.mean(f1)))


NUMBERS = st.lists(st.tuples(st.integers(-5, 5).map(float), st.integers(-5, 5).map(float)), max_size=12)


@drawn(80)
@given(NUMBERS)
def test_a_correlation_is_that_of_numpy(rows: list[tuple[float, float]]) -> None:
    one, other = torch.tensor(rows, dtype=torch.float64).reshape(-1, 2).unbind(1)
    parts = [torch.ones_like(one), (one - other).square(), one, other, one.square(), other.square(), one * other]
    found = float(labelled._correlations(torch.stack([part.sum() for part in parts]).unsqueeze(1)))
    if len(set(one.tolist())) > 1 and len(set(other.tolist())) > 1:
        assert close(found, float(np.corrcoef(one.numpy(), other.numpy())[0, 1]))
    else:
        assert found == 0


TAGS = st.lists(st.tuples(*[st.sampled_from(["O", "B-A", "I-A", "B-B", "I-B"])] * 2), min_size=1, max_size=6)


@drawn(60)
@given(st.lists(TAGS, max_size=4))
def test_entities_are_measured_as_by_seqeval(sentences: list[list[tuple[str, str]]]) -> None:
    theirs = importlib.import_module("seqeval.metrics")
    rows = [([pair[0] for pair in each], [pair[1] for pair in each]) for each in sentences]
    sums = np.sum([(0.0, 0.0, 0.0), *(entity_counts(*row) for row in rows)], axis=0)
    found = entity_metrics(*sums.tolist())
    if sums[1] + sums[2] == 0:
        assert all(map(math.isnan, found.values()))
        return
    wanted, predicted = [row[0] for row in rows], [row[1] for row in rows]
    with warnings.catch_warnings():
        # It warns of what has no prediction or no entity.
        warnings.simplefilter("ignore")
        pairs = {"precision": theirs.precision_score, "recall": theirs.recall_score, "f1": theirs.f1_score}
        assert all(close(found[name], score(wanted, predicted)) for name, score in pairs.items())
