"""Which charts are made of which metrics."""

from dataclasses import replace
from pathlib import Path

import pytest

from kitforge.report.chart import Chart
from kitforge.report.chart_specs import chart_groups, is_bad
from kitforge.report.metrics import LoggedEvent, RunRecord, Series, read_run


def charts(runs: list[RunRecord], labels: list[str]) -> list[Chart]:
    return [chart for _, drawn in chart_groups(runs, labels) for chart in drawn]


def run_of(train: dict[str, float], evaluation: dict[str, float], *events: str) -> RunRecord:
    return RunRecord(
        name="run",
        folder=Path("run"),
        config_text="",
        train={name: Series(steps=(1,), values=(value,)) for name, value in train.items()},
        eval={name: Series(steps=(1,), values=(value,)) for name, value in evaluation.items()},
        events=tuple(LoggedEvent(step=1, name=name, message="") for name in events),
        samples=(),
        problems=(),
    )


def test_an_evaluation_joins_the_training_metric_of_its_name() -> None:
    found = charts([run_of({"loss": 2.0, "auc": 0.5}, {"eval/loss": 3.0, "eval/ndcg": 0.1})], ["run"])
    lines = {chart.title: [(line.label, line.tone) for line in chart.lines] for chart in found}
    assert lines == {
        "Loss": [("training", 0), ("validation", 1)],
        "AUC": [("training", 0)],
        "NDCG": [("validation", 1)],
    }


def test_the_loads_of_all_experts_share_one_chart() -> None:
    loads = {f"experts/load/{number}": float(value) for number, value in enumerate((0.5, 2.0, 1.0, 0.5, 1.0))}
    mixture = run_of({"loss": 2.0, "experts/fullest": 3.0, "experts/dropped": 0.0, **loads}, {})
    panels = chart_groups([mixture], ["run"])
    assert [(title, [chart.title for chart in drawn]) for title, drawn in panels] == [
        ("Curves", ["Loss"]),
        ("Load of the experts", ["Load of the experts", "Experts / dropped", "Experts / fullest"]),
    ]
    lines = panels[-1][1][0].lines
    assert [(line.label, line.series.values) for line in lines] == [
        ("fullest", (2.0,)),
        ("median", (1.0,)),
        ("emptiest", (0.5,)),
    ]
    both = chart_groups([mixture, run_of({"loss": 1.0}, {})], ["one", "other"])[-1][1][0]
    assert [line.label for line in both.lines] == ["one: fullest", "one: median", "one: emptiest"]


def test_an_evaluation_of_a_policy_is_not_drawn_on_the_axis_of_its_training_loss() -> None:
    found = charts([run_of({"loss": 2.0, "reward": 0.5}, {"eval/loss": 3.0, "eval/reward": 0.1})], ["run"])
    lines = {chart.title: [line.label for line in chart.lines] for chart in found}
    assert lines == {
        "Reward": ["training", "validation"],
        "Training loss": ["training"],
        "Validation loss": ["validation"],
    }


def test_bounds_and_baselines_are_lines_of_their_charts_in_the_order_of_k() -> None:
    values = {"auc": 0.7, "best_auc": 0.8, "mrr": 0.1, "popularity_hr@10": 0.2, "unknown_share/user": 0.3}
    evaluated = {f"eval/{name}": value for name, value in values.items()} | {
        f"eval/hr@{k}": 0.4 for k in (10, 1, 20, 5)
    }
    found = charts([replace(run_of({"loss": 2.0}, evaluated), metric_for_best=("eval/hr@10", "max"))], ["run"])
    lines = {chart.title: [(line.label, line.tone) for line in chart.lines] for chart in found}
    assert list(lines) == ["Loss", "HR@10", "AUC", "HR@1", "HR@5", "HR@20", "MRR"]
    assert lines["AUC"] == [("validation", 1), ("best possible", 2)]
    assert lines["HR@10"] == [("popularity", 2), ("validation", 1)]
    # Without its chart, a baseline has one of its own.
    (alone,) = charts([run_of({}, {"eval/best_auc": 0.8})], ["run"])
    assert alone.title == "Best possible AUC"


def test_runs_side_by_side_have_their_own_colours_and_names() -> None:
    runs = [run_of({"loss": 2.0}, {"eval/loss": 3.0}), run_of({"loss": 2.0}, {})]
    (chart,) = charts(runs, ["one", "two"])
    found = [(line.label, line.run, line.tone) for line in chart.lines]
    assert found == [("one", 0, 0), ("one (validation)", 0, 0), ("two", 1, 1)]


def test_progress_is_no_curve() -> None:
    assert (
        charts([run_of({"epoch": 1, "tokens": 9, "skipped": 1, "time/seconds": 5}, {"eval/tokens": 3})], ["run"]) == []
    )


def test_memory_is_drawn_in_a_unit_that_fits() -> None:
    (chart,) = charts([run_of({"time/memory_bytes": 3 * 2.0**30}, {})], ["run"])
    assert chart.unit == "GiB"
    assert chart.lines[0].series.values == (3.0,)


def test_checkpoints_are_not_marked_on_the_loss_but_skips_are() -> None:
    (chart,) = charts([run_of({"loss": 1.0}, {}, "checkpoint", "skipped", "resumed")], ["run"])
    assert [(mark.label, mark.is_bad) for mark in chart.marks] == [
        ("skipped at step 1", True),
        ("resumed at step 1", False),
    ]


@pytest.mark.parametrize("name", ["skipped", "rollback", "interrupt", "damaged"])
def test_events_to_look_at(name) -> None:
    assert is_bad(LoggedEvent(step=1, name=name, message=""))


def test_a_whole_run_makes_the_charts_that_everybody_wants(write_run) -> None:
    found = charts([read_run(write_run(num_steps=24))], ["run"])
    assert [chart.title for chart in found][:5] == ["Loss", "Learning rate", "Gradient norm", "Throughput", "Memory"]
    assert [chart.is_wide for chart in found][:2] == [True, False]
