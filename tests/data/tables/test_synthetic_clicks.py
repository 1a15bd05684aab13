"""The made-up click log: any row at any time, ids and clicks as planted, and an AUC that is known beforehand."""

import dataclasses

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from kitforge.data.tables.columns import ColumnLayout, KeyColumn, LabelColumn, NamedColumns
from kitforge.data.tables.split import RowSet, split_rows
from kitforge.data.tables.synthetic_clicks import SyntheticClicks, SyntheticClicksConfig
from kitforge.foundation.errors import ConfigError
from tests.data.tables.reading_rows import equal

CONFIG = SyntheticClicksConfig(num_rows=50_000, history=5)


def test_a_row_is_the_same_whenever_it_is_asked_for() -> None:
    log = SyntheticClicks(CONFIG)
    whole = log.rows(np.arange(1000))
    rows = np.array([999, 3, 3, 500])
    assert equal(log.rows(rows), whole.take(rows))
    assert equal(SyntheticClicks(CONFIG).rows(rows), whole.take(rows))


def test_a_row_far_beyond_the_end_is_had_at_once() -> None:
    found = SyntheticClicks(CONFIG).rows(np.array([10**15, 10**15 + 1]))
    assert len(found) == 2
    assert not np.array_equal(found.keys[0], found.keys[1])


@pytest.mark.parametrize(
    "change", [{"seed": 1}, {"zipf": 1.2}, {"fields": (100, 100, 10, 10, 10, 10)}, {"num_rows": 9}]
)
def test_every_option_makes_another_log(change: dict[str, object]) -> None:
    other = SyntheticClicks(dataclasses.replace(CONFIG, **change))  # type: ignore[arg-type]
    assert other.fingerprint != SyntheticClicks(CONFIG).fingerprint


def test_the_first_row_is_the_same_in_every_version() -> None:
    row = SyntheticClicks(SyntheticClicksConfig()).rows(np.array([0]))
    assert row.keys[0, :2].tolist() == [3329409776410504670, 2419596411995753099]
    assert row.numbers[0, 0] == pytest.approx(0.62729966)


def test_ids_follow_zipfs_law() -> None:
    log = SyntheticClicks(dataclasses.replace(CONFIG, fields=(1000, 50, 5), crosses=(), zipf=1.2))
    _, counts = np.unique(log.rows(np.arange(50_000)).keys[:, 0], return_counts=True)
    shares = np.sort(counts)[::-1] / counts.sum()
    cut = np.diff(np.arange(1, 1002) ** -0.2) / (1001**-0.2 - 1)
    assert len(counts) > 900
    assert np.abs(shares[:20] - cut[:20]).max() < 0.01


def test_clicks_come_as_often_as_the_chances_say() -> None:
    log = SyntheticClicks(CONFIG)
    rows = np.arange(log.num_rows)
    labels, chances = log.rows(rows).labels, log.probabilities(rows)
    assert labels is not None
    for low in np.arange(0, 0.8, 0.1):
        among = (chances >= low) & (chances < low + 0.1)
        deviation = np.sqrt((chances[among] * (1 - chances[among])).sum())
        assert abs(labels[among].sum() - chances[among].sum()) < 4 * deviation


@pytest.mark.parametrize("part", ["crosses", "history", "num_dense"])
def test_each_planted_part_matters(part: str) -> None:
    """Without it the same rows have other chances, and knowing it is worth some of the AUC."""
    nothing: dict[str, object] = {"crosses": (), "history": 0, "num_dense": 0}
    log, rows = SyntheticClicks(CONFIG), np.arange(20_000)
    blind = SyntheticClicks(dataclasses.replace(CONFIG, **{part: nothing[part]}))  # type: ignore[arg-type]
    labels = log.rows(rows).labels
    best = roc_auc_score(labels, log.probabilities(rows))
    assert roc_auc_score(labels, blind.probabilities(rows)) < best - 0.005


@pytest.mark.parametrize(
    "options",
    [{"num_rows": 0}, {"fields": ()}, {"zipf": 1}, {"crosses": ((0, 9),)}, {"missing": 1.0}, {"click_rate": 0.0}],
)
def test_what_cannot_be_made_up_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"click_log\."):
        SyntheticClicksConfig(**options)  # type: ignore[arg-type]


class Users:
    """A table of nothing but users."""

    layout = ColumnLayout(keys=(KeyColumn(name="user", kind="integer"),), label=LabelColumn(name="click"))
    fingerprint = "users"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def rows(self, indices: NDArray[np.int64]):  # type: ignore[no-untyped-def]
        keys = (indices // 7)[:, None]
        from kitforge.data.tables.columns import Columns

        return Columns(numbers=np.zeros((len(keys), 0)), keys=keys, absent=keys < 0, lists={})


def numbers(rows: RowSet) -> list[int]:
    return rows.rows(np.arange(rows.num_rows)).tolist()


@pytest.mark.parametrize("rule", ["random", "last", "group"])
@pytest.mark.parametrize("num_rows", [1, 2, 19, 20, 21, 1003])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5])
def test_every_row_is_trained_on_or_kept_and_none_both(rule: str, num_rows: int, share: float) -> None:
    training, validation = split_rows(Users(num_rows), rule, share, seed=3, group="user")  # type: ignore[arg-type]
    assert sorted(numbers(training) + numbers(validation)) == list(range(num_rows))
    assert numbers(training) == sorted(numbers(training))
    if num_rows > 1000:
        assert validation.num_rows / num_rows == pytest.approx(share, abs=0.1)


def test_the_last_rows_are_the_latest() -> None:
    assert numbers(split_rows(Users(100), "last", 0.1, seed=0)[1]) == list(range(90, 100))


def test_a_group_is_never_cut() -> None:
    training, validation = split_rows(Users(700), "group", 0.3, seed=0, group="user")
    users = [set(NamedColumns(Users(700).rows(np.array(numbers(part))), Users.layout).keys("user")[0].tolist())
             for part in (training, validation)]  # fmt: skip
    assert not users[0] & users[1]
    assert len(users[1]) > 10


def test_another_seed_keeps_other_rows() -> None:
    assert len({tuple(numbers(split_rows(Users(100), "random", 0.1, seed=seed)[1])) for seed in range(5)}) == 5


def test_no_share_keeps_nothing() -> None:
    training, validation = split_rows(Users(10), "random", 0, seed=0)
    assert (training.num_rows, validation.num_rows) == (10, 0)


def test_a_split_by_group_needs_a_group() -> None:
    with pytest.raises(ConfigError, match=r"data\.schema\.group"):
        split_rows(Users(10), "group", 0.5, seed=0)
