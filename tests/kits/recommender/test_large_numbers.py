"""Numbers keep their size and order: losses of large logits, numbers beyond float32, NaN scores, long times."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from kitforge.core.parallel.world import World
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import ColumnLayout, ListColumn
from kitforge.data.tables.events import EventColumns, sequences_of
from kitforge.data.tables.reader import read_columns
from kitforge.data.tables.source import open_table
from kitforge.foundation.errors import DataError, ModelError
from kitforge.inference.server.errors import ApiError
from kitforge.kits.recommender.build import TASKS
from kitforge.kits.recommender.data import load_dataset
from kitforge.kits.recommender.features import common_precision
from kitforge.kits.recommender.metrics import ClickMetrics, RankingMetrics, all_reduce_ranking_metrics, rank_users
from kitforge.kits.recommender.server.requests import RowReader
from tests.data.tables.reading_rows import columns_of
from tests.kits.recommender.runs import ready

KIT = TASKS["recommendation"]
WORLD = World(device=torch.device("cpu"))


def log_loss(logits: list[float], labels: list[float]) -> float:
    metrics = ClickMetrics()
    metrics.add(np.array(logits), np.array(labels))
    return metrics.result()["log_loss"]


@pytest.mark.parametrize("value", [0.7, 1e17, -1e17, 20261127.0, 2.0**53 - 1, 2.0**53 + 2])
def test_a_number_is_one_in_either_precision_and_exact_where_it_is_whole_and_float64_is(value: float) -> None:
    single, is_exact = float(np.float32(value)), value == int(value) and abs(value) < 2**53
    assert common_precision(np.array([value, single])).tolist() == [value if is_exact else single, single]


def test_the_log_loss_of_large_logits_is_their_size() -> None:
    assert log_loss([2e8, -1.0, 1.0], [0, 0, 1]) == pytest.approx((2e8 + 2 * math.log1p(math.exp(-1))) / 3, rel=1e-12)
    assert log_loss([3000.0] * 65_536, [0] * 65_528 + [1] * 8) == pytest.approx(3000 * 65_528 / 65_536, rel=1e-12)
    assert log_loss([1e300, -1e300], [0, 1]) == 1e300
    assert log_loss([1.7e308, 1.7e308], [0, 0]) == 1.7e308
    assert log_loss([700.0, 1e12], [0, 1]) == 350


def test_the_log_loss_of_small_and_large_terms_is_that_of_exact_sums() -> None:
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=1000) * 10.0 ** draw.integers(-3, 9, 1000), draw.integers(0, 2, 1000)
    terms = np.logaddexp(0, np.where(labels > 0, -logits, logits))
    metrics, other = ClickMetrics(), ClickMetrics()
    metrics.add(logits, labels)
    for part in np.array_split(np.arange(1000), 7):
        one = ClickMetrics()
        one.add(logits[part], labels[part])
        other.merge(one.state())
    assert (
        metrics.result()["log_loss"] == other.result()["log_loss"] == pytest.approx(math.fsum(terms) / 1000, rel=1e-9)
    )


def test_scores_that_are_nan_make_metrics_nan() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [1.0, math.nan, 3.0]])
    ranks, _ = rank_users(lambda block: scores[block], np.array([2, 2]), 3)
    metrics = RankingMetrics()
    metrics.add(ranks)
    assert all(math.isnan(value) for value in all_reduce_ranking_metrics(metrics, 0.0, WORLD).values() if value != 0)
    fine = RankingMetrics()
    fine.add(ranks[:1])
    assert fine.result()["hr@1"] == 1


@torch.no_grad()
@pytest.mark.parametrize("family", ["two_tower", "sasrec", "wide_deep"])
def test_a_diverged_model_has_metrics_that_are_nan_and_scores_that_are_an_error(family: str, tmp_path: Path) -> None:
    assembly, _ = ready(tmp_path, family, {})
    model: Any = assembly.loop.model
    for parameter in model.parameters():
        parameter.fill_(math.nan)
    metrics = assembly.loop.task.evaluate(model)
    assert math.isnan(metrics["eval/loss"]) and math.isnan(metrics.get("eval/auc", metrics.get("eval/hr@10", 0.0)))
    opened = KIT.open_pipeline(model, assembly.processor, assembly.options)
    with pytest.raises(ModelError, match=r"(?s)gives no score.*diverged"):
        if family == "wide_deep":
            opened.scores(assembly.loop.task._dataset.eval.batch(np.arange(2)))  # type: ignore[attr-defined]
        else:
            rows = assembly.loop.task._dataset.eval.batch(np.arange(2))  # type: ignore[attr-defined]
            opened.items(rows, 3)


@pytest.mark.parametrize("value", [1e39, -1e308, "1e39", 2**130])
def test_a_number_beyond_float32_is_refused_by_its_cell(value: Any) -> None:
    with pytest.raises(DataError, match=r"(?s)row 2 of the data holds a number beyond float32 in column 'x'"):
        columns_of([{"x": 1.0}, {"x": value}], ColumnLayout(numbers=("x",)))
    bad = BadRows(policy="skip")
    assert len(columns_of([{"x": 1.0}, {"x": value}], ColumnLayout(numbers=("x",)), bad)) == 1 and bad.total == 1


def test_a_number_that_float32_cannot_hold_once_standardized_is_refused() -> None:
    rows = {"x": np.linspace(0, 1e-9, 100), "click": np.arange(100) % 2}
    dataset = load_dataset(rows, None, KIT.read_options({"task": "recommendation"}).data, 0, None)
    reader = RowReader(dataset.encoder, ["x"], [], 10, CellRules())
    with pytest.raises(ApiError, match=r"(?s)'x'.*float32 cannot hold"):
        reader.read({"rows": [{"x": 1e38}]})
    with pytest.raises(ApiError, match=r"(?s)rows\[1\] holds a number beyond float32 in column 'x'"):
        reader.read({"rows": [{"x": 1}, {"x": 1e39}]})


TIMES: dict[str, Any] = {
    "counters": [7123456789012345678 + k for k in range(6)],
    "negative": [-7123456789012345678 + k for k in range(6)],
    "beyond int64": [2**63 + 4096 * k for k in range(6)],
    "nanoseconds": [1_700_000_000_000_000_000 + 100 * k for k in range(6)],
    "texts of counters": [str(7123456789012345678 + k) for k in range(6)],
    "pandas": list(pandas.Timestamp("2026-01-01") + pandas.to_timedelta(np.arange(6) * 100, unit="ns")),
    "iso": [f"2026-01-01T10:00:00.{k * 100:09d}" for k in range(6)],
    "iso and zone": [f"2026-01-01 10:00:00.{k * 100:09d}+02:00" for k in range(6)],
    "before 1970": [f"1969-12-31T23:59:59.{k * 100:09d}" for k in range(6)],
    "utc": [f"2019-10-01 00:00:0{k} UTC" for k in range(6)],
    "seconds": [1_700_000_000 + 0.25 * k for k in range(6)],
    "texts of seconds": [f"1700000000.{k}" for k in range(6)],
    "negative seconds": ["-1.75", "-1.5", "-1", "-0.5", "0.25", "1e1"],
    "some dates": ["2026-01-01", "2026-01-01T00:00:01Z", "2026-01-02", "2100-01-01", "2400-01-01", "9999-01-01"],
}


@pytest.mark.parametrize("container", ["rows", "frame", "csv"])
@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_events_are_in_the_order_of_their_times(times: list[Any], container: str, tmp_path: Path) -> None:
    order = [3, 0, 5, 1, 4, 2]
    rows: Any = pandas.DataFrame({"user": 1, "item": order, "time": [times[place] for place in order]})
    if container == "rows":
        rows = rows.to_dict("records")
    elif container == "csv":
        rows.to_csv(tmp_path / "a.csv", index=False)
        rows = tmp_path / "a.csv"
    source = sequences_of(open_table(rows), EventColumns(user="user", item="item", time="time"), ["item"])
    layout = ColumnLayout(lists=(ListColumn(name="item", kind="integer"),))
    (columns,) = read_columns(source, layout, BadRows(), num_workers=1)
    assert columns.lists["item"].values.tolist() == list(range(6))


@pytest.mark.parametrize("times", TIMES.values(), ids=TIMES)
def test_a_split_by_time_cuts_in_the_order_of_times(times: list[Any]) -> None:
    order = [3, 0, 5, 1, 4, 2]
    rows = [{"n": float(place), "time": times[place], "click": place % 2} for place in order]
    given = {"split": "time", "time_column": "time", "eval_fraction": 0.34}
    schema = {"numeric": {"n": {}}, "label": {"name": "click"}}
    options = KIT.read_options({"task": "recommendation", "data": {**given, "schema": schema}}).data
    found = load_dataset(rows, None, options, 0, None)
    assert found.eval is not None and sorted(found.eval.columns(np.arange(2)).numbers("n").tolist()) == [4, 5]


@pytest.mark.parametrize("policy", ["skip", "refuse"])
def test_events_without_one_good_row_are_refused_in_words(policy: Any) -> None:
    rows = [{"user": 1, "item": n, "time": f"01/15/202{n}"} for n in range(5)]
    source = sequences_of(open_table(rows), EventColumns(user="user", item="item", time="time"), ["item"])
    layout = ColumnLayout(lists=(ListColumn(name="item", kind="integer"),))
    with pytest.raises(DataError, match=r"row 1 of the data holds no number in column 'time'|5 bad ones left out"):
        list(read_columns(source, layout, BadRows(policy=policy), num_workers=1))
