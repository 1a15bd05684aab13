"""Click metrics against scikit-learn and brute force, for any ties, any chunks and any number of ranks."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.kits.recommender.metrics import ClickMetrics, RankingMetrics, auc, grouped_auc, histogram_auc

ROWS = st.lists(st.tuples(st.integers(-3, 3), st.booleans(), st.integers(0, 2)), min_size=1, max_size=40)


def arrays(rows: list[tuple[int, bool, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    scores, labels, groups = zip(*rows, strict=True)
    return np.array(scores, float), np.array(labels, float), np.array(groups)


def brute_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    pairs = [(p > n) + (p == n) / 2 for p in scores[labels == 1] for n in scores[labels == 0]]
    return float(np.mean(pairs)) if pairs else math.nan


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


def test_one_class_only_has_a_loss_and_no_auc() -> None:
    found = ClickMetrics()
    found.add(np.zeros(3), np.zeros(3))
    result = found.result()
    assert result["log_loss"] == pytest.approx(math.log(2))
    assert all(math.isnan(result[name]) for name in ("auc", "normalized_entropy", "calibration"))
    assert all(map(math.isnan, ClickMetrics().result().values()))


def test_a_group_is_needed_where_groups_were_asked_for() -> None:
    with pytest.raises(ValueError, match="a group for each row"):
        ClickMetrics(is_grouped=True).add(np.zeros(2), np.zeros(2))


def test_ranks_of_processes_add_up_to_the_same_bits() -> None:
    ranks = np.random.default_rng(0).integers(0, 100, 1000)
    whole, total = RankingMetrics(), RankingMetrics()
    whole.add(ranks)
    for process in (2, 0, 1):
        part = RankingMetrics()
        part.add(ranks[process::3])
        total.merge(part.counts)
    assert total.result() == whole.result()
