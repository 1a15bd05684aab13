"""The headline numbers."""

import json
from pathlib import Path

import pytest

from kitforge.report.metrics import RunRecord, read_run
from kitforge.report.summary import Figure, goal, headline, last_values, metric_words, num_skipped, seconds, title


def run_of(folder: Path, *lines: dict[str, object]) -> RunRecord:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_run(folder)


def train(step: int, **values: object) -> dict[str, object]:
    return {"kind": "train", "step": step, **{name.replace("__", "/"): value for name, value in values.items()}}


def figures(run: RunRecord) -> dict[str, Figure]:
    return {figure.label: figure for figure in headline(run)}


def test_the_headline_of_a_whole_run(write_run) -> None:
    found = figures(read_run(write_run(num_steps=600)))
    assert list(found) == ["Best validation loss", "Loss", "Steps", "Tokens", "Time", "Throughput", "Peak memory"]
    assert found["Steps"].text == "600"
    assert found["Steps"].detail == "1 skipped"
    assert found["Time"].text == "2 min 6 s"
    assert found["Throughput"].detail == "tokens/s, median"


def test_the_loss_goes_from_first_to_last(tmp_path) -> None:
    found = figures(run_of(tmp_path, train(1, loss=9.0), train(2, loss=4.0), train(3, loss=5.0)))["Loss"]
    assert (found.text, found.detail) == ("5", "from 9")


def test_the_best_evaluation_is_where_the_loss_was_lowest(tmp_path) -> None:
    lines = [{"kind": "eval", "step": step, "eval/loss": loss} for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))]
    found = figures(run_of(tmp_path, *lines))["Best validation loss"]
    assert (found.text, found.detail) == ("2", "at step 20")


def evaluations(*values: tuple[float, float]) -> list[dict[str, object]]:
    """Losses and AUCs, ten steps apart."""
    return [
        {"kind": "eval", "step": 10 * number, "eval/loss": loss, "eval/auc": auc}
        for number, (loss, auc) in enumerate(values, start=1)
    ]


def run_event(step: int = 0, metric: str = "eval/auc", mode: str = "max") -> dict[str, object]:
    chosen = {"metric_for_best": metric, "metric_for_best_mode": mode}
    return {"kind": "event", "step": step, "event": "run", "message": "", **chosen}


def test_the_metric_that_selects_the_weights_leads(tmp_path) -> None:
    lines = evaluations((3.0, 0.6), (2.0, 0.8), (1.0, 0.7))
    first = headline(run_of(tmp_path, train(1, loss=9.0), run_event(), *lines))[0]
    assert (first.label, first.text, first.detail) == ("Best validation AUC", "0.8", "at step 20")
    # Its way is the run's, whatever its name says.
    first = headline(run_of(tmp_path, run_event(metric="eval/loss"), *lines))[0]
    assert (first.label, first.text, first.detail) == ("Best validation loss", "3", "at step 10")


def test_the_last_values_of_a_run_that_stopped_early_are_those_of_its_weights(tmp_path) -> None:
    lines = [run_event(), *evaluations((3.0, 0.6), (2.0, 0.8), (1.0, 0.7))]
    lines.append({"kind": "event", "step": 30, "event": "restore", "message": "", "weights_of_step": 20})
    last = {figure.label: figure.value for figure in last_values(run_of(tmp_path, *lines))}
    assert last == {"Last validation AUC": 0.8, "Last validation loss": 2.0}
    # A run that is resumed and goes on has weights of its last step again.
    lines += [run_event(30), {"kind": "eval", "step": 40, "eval/auc": 0.5}]
    assert {figure.label: figure.value for figure in last_values(run_of(tmp_path, *lines))}[
        "Last validation AUC"
    ] == 0.5


def test_the_best_accuracy_is_the_highest(tmp_path) -> None:
    lines = [{"kind": "eval", "step": step, "eval/auc": auc} for step, auc in ((10, 0.6), (20, 0.8), (30, 0.7))]
    assert figures(run_of(tmp_path, *lines))["Best validation AUC"].text == "0.8"


def test_the_clock_is_summed_over_resumes(tmp_path) -> None:
    times = (1.0, 5.0, 2.0, 4.0)
    assert seconds(run_of(tmp_path, *(train(step, time__seconds=time) for step, time in enumerate(times)))) == 9.0


def test_skips_are_counted_so_far(tmp_path) -> None:
    assert num_skipped(run_of(tmp_path, *(train(step, skipped=count) for step, count in enumerate((0, 1, 1, 3))))) == 3


def test_a_run_without_numbers_has_a_headline(tmp_path) -> None:
    assert [figure.label for figure in headline(run_of(tmp_path))] == ["Steps"]


def test_a_last_loss_that_is_not_finite_is_said(tmp_path) -> None:
    assert figures(run_of(tmp_path, train(1, loss=9.0), train(2, loss=None)))["Loss"].text == "not finite"


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("eval/loss", "lower"),
        ("perplexity", "lower"),
        ("eval/auc", "higher"),
        ("eval/hit_at_10", "higher"),
        ("eval/hr@10", "higher"),
        ("time/tokens_per_second", "higher"),
        ("learning_rate", None),
        ("reward/kl", None),
    ],
)
def test_which_way_is_better(name, way) -> None:
    assert goal(name) == way


def test_titles_are_written_for_people() -> None:
    assert title("grad_norm") == "Gradient norm"
    assert [title(name) for name in ("approx_kl", "kl_coef", "completion/eos_rate")] == [
        "Approx. KL",
        "KL coefficient",
        "Finished completions",
    ]
    assert title("reward/chosen_mean") == "Reward / chosen mean"


def test_a_terminal_gets_the_largest_shares_of_unknown_values_in_one_sentence() -> None:
    shares = {"os": 0.0, "ip": 0.8, "site": 0.1234, "app": 0.02, "hour": 0.01, "void": float("nan")}
    metrics = {"eval/auc": 0.5} | {f"eval/unknown_share/{name}": value for name, value in shares.items()}
    assert metric_words({"eval/loss": 1.0, **metrics}, "eval/auc") == [
        ("eval/auc", "0.5000"),
        ("eval/loss", "1.0000"),
        ("unknown values", "ip 80%, site 12%, app 2%, 1 more features"),
    ]
    assert metric_words({"eval/unknown_share/os": 0.0}) == []
