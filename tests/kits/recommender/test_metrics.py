"""Click metrics against scikit-learn and brute force, for any ties, any chunks and any number of ranks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, ndcg_score, roc_auc_score

from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender import metrics
from kitforge.kits.recommender.metrics import (
    ClickMetrics,
    RankingMetrics,
    auc,
    grouped_auc,
    histogram_auc,
    target_ranks,
)

ROWS = st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=40)


def arrays(rows: list[tuple[int, bool, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scores, labels, groups = zip(*rows, strict=True)
    return np.array(scores, float), np.array(labels, float), np.array(groups)


def brute_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    return float(np.mean(pairs)) if pairs else math.nan


@given(ROWS)
def test_the_auc_counts_pairs_with_ties_half(rows: list[tuple[int, bool, int]]) -> None:
    scores, labels, _ = arrays(rows)
    assert auc(scores, labels) == pytest.approx(brute_auc(scores, labels), abs=1e-12, nan_ok=True)


@given(ROWS)
def test_the_grouped_auc_weights_groups_by_rows_and_skips_those_of_one_class(rows: list[tuple[int, bool, int]]) -> None:
    scores, labels, groups = arrays(rows)
    parts = [(brute_auc(scores[groups == group], labels[groups == group]), (groups == group).sum())
             for group in set(groups.tolist())]  # fmt: skip
    valid = [(value, size) for value, size in parts if not math.isnan(value)]
    found = grouped_auc(scores, labels, groups)
    assert (found.num_groups, found.num_skipped) == (len(valid), len(parts) - len(valid))
    wanted = np.average([v for v, _ in valid], weights=[s for _, s in valid]) if valid else math.nan
    assert found.auc == pytest.approx(wanted, abs=1e-12, nan_ok=True)


def test_no_rows_have_no_auc() -> None:
    nothing = np.zeros(0)
    assert math.isnan(auc(nothing, nothing))
    assert grouped_auc(nothing, nothing, nothing.astype(int)).num_skipped == 0


@pytest.fixture(scope="module")
def clicks() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    logits = np.round(random.normal(-2, 2, 20_000), 2).astype(np.float32)
    labels = (random.random(20_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    return logits, labels, random.integers(0, 500, 20_000)


def collected(logits: np.ndarray, labels: np.ndarray, groups: np.ndarray, size: int, **options: int) -> ClickMetrics:
    found = ClickMetrics(is_grouped=True, **options)  # type: ignore[arg-type]
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        found.add(logits[part], labels[part], groups[part])
    return found


def test_the_metrics_are_scikit_learns(clicks: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    logits, labels, _ = clicks
    chances = 1 / (1 + np.exp(-logits.astype(float)))
    found = collected(*clicks, size=1000).result()
    rate = labels.mean(dtype=float)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found["log_loss"] == pytest.approx(log_loss(labels, chances), abs=1e-10)
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found["normalized_entropy"] == pytest.approx(log_loss(labels, chances) / entropy, abs=1e-9)
    assert found["calibration"] == pytest.approx(chances.sum() / labels.sum(), abs=1e-9)


@pytest.mark.parametrize("size", [1, 777, 20_000])
@pytest.mark.parametrize("exact_rows", [10**9, 500, 0])
def test_chunks_ranks_and_their_order_change_no_bit(
    clicks: tuple[np.ndarray, np.ndarray, np.ndarray], size: int, exact_rows: int
) -> None:
    some = tuple(column[:600] for column in clicks) if size == 1 else clicks
    wanted = collected(*some, size=len(some[0]), exact_rows=exact_rows).result()
    ranks = [collected(*(column[rank::3] for column in some), size=size, exact_rows=exact_rows) for rank in range(3)]
    for order in ((0, 1, 2), (2, 0, 1)):
        total = ClickMetrics(is_grouped=True, exact_rows=exact_rows)
        for rank in order:
            total.merge(ranks[rank].state())
        assert total.result() == wanted
    assert ("auc_error" in wanted) == (exact_rows < len(some[0]))


def test_the_binned_auc_is_within_its_bound(clicks: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    exact = collected(*clicks, size=5000).result()
    binned = collected(*clicks, size=5000, exact_rows=100).result()
    assert 0 < binned["auc_error"] < 1e-3
    assert abs(binned["auc"] - exact["auc"]) <= binned["auc_error"]
    assert binned["grouped_auc"] == exact["grouped_auc"]


@given(ROWS)
def test_the_bound_holds_for_the_coarsest_bins(rows: list[tuple[int, bool, int]]) -> None:
    scores, labels, _ = arrays(rows)
    bins = (scores + 3).astype(int) // 3
    value, bound = histogram_auc(
        np.bincount(bins[labels == 1], minlength=3), np.bincount(bins[labels == 0], minlength=3)
    )
    exact = auc(scores, labels)
    assert math.isnan(exact) == math.isnan(value)
    assert math.isnan(exact) or abs(value - exact) <= bound + 1e-12


def test_extreme_logits_neither_overflow_nor_clip() -> None:
    found = ClickMetrics()
    found.add(np.array([700.0, -700.0, 800.0]), np.array([1.0, 0.0, 0.0]))
    assert found.result()["log_loss"] == pytest.approx(800 / 3)
    assert found.result()["calibration"] == pytest.approx(2.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_spoils_every_metric(value: float) -> None:
    found = ClickMetrics()
    found.add(np.array([0.0, value, 1.0]), np.array([1.0, 0.0, 1.0]))
    assert all(map(math.isnan, found.result().values()))


def test_one_class_only_has_a_loss_and_no_auc() -> None:
    found = ClickMetrics()
    found.add(np.zeros(3), np.zeros(3))
    result = found.result()
    assert result["log_loss"] == pytest.approx(math.log(2))
    assert all(math.isnan(result[name]) for name in ("auc", "normalized_entropy", "calibration"))
    assert all(map(math.isnan, ClickMetrics().result().values()))


def test_a_sum_of_floats_would_be_caught(
    clicks: tuple[np.ndarray, np.ndarray, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "_units", lambda values: float(values.astype(np.float32).sum() * metrics._UNIT))
    with pytest.raises(AssertionError):
        test_chunks_ranks_and_their_order_change_no_bit(clicks, 777, 10**9)


def test_ties_counted_whole_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = metrics.grouped_auc
    monkeypatch.setattr(
        metrics, "grouped_auc", lambda scores, labels, groups: whole(scores + labels / 9, labels, groups)
    )
    with pytest.raises(AssertionError):
        test_the_auc_counts_pairs_with_ties_half()


def test_a_group_is_needed_where_groups_were_asked_for() -> None:
    with pytest.raises(ValueError, match="a group for each row"):
        ClickMetrics(is_grouped=True).add(np.zeros(2), np.zeros(2))


def test_a_tie_is_lost_and_what_is_not_asked_for_is_not_counted() -> None:
    scores = np.array([[0.1, 0.5, 0.3], [1.0, 1.0, 1.0], [0.2, -np.inf, 0.1]])
    assert target_ranks(scores, np.array([2, 0, 2])).tolist() == [1, 2, 1]


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_ranking_metrics_are_those_of_brute_force_and_scikit_learn(cut: int) -> None:
    random = np.random.default_rng(cut)
    scores, targets = random.random((200, 30)), random.integers(0, 30, 200)
    found = RankingMetrics(cuts=(cut,))
    found.add(target_ranks(scores, targets))
    places = [1 + sorted(row, reverse=True).index(row[target]) for row, target in zip(scores, targets, strict=True)]
    result = found.result()
    assert result[f"hr@{cut}"] == np.mean([place <= cut for place in places])
    assert result["mrr"] == pytest.approx(np.mean([1 / place for place in places]))
    assert result[f"ndcg@{cut}"] == pytest.approx(ndcg_score(np.eye(30)[targets], scores, k=cut))


def test_ranks_of_processes_add_up_to_the_same_bits() -> None:
    ranks = np.random.default_rng(0).integers(0, 100, 1000)
    whole, total = RankingMetrics(), RankingMetrics()
    whole.add(ranks)
    for process in (2, 0, 1):
        part = RankingMetrics()
        part.add(ranks[process::3])
        total.merge(part.counts)
    assert total.result() == whole.result()


def test_without_targets_there_is_nothing_to_say() -> None:
    assert all(map(math.isnan, RankingMetrics().result().values()))
    with pytest.raises(ConfigError, match="cuts"):
        RankingMetrics(cuts=(0,))
