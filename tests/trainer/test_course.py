"""The course of a run: how long, at which learning rate, what is logged, what is kept, when it stops."""

import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from kitforge.core.checkpoint import save as saving
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import KEEP, step_folder, steps
from kitforge.core.checkpoint.shard_writer import Written
from kitforge.core.checkpoint.snapshot import Snapshot
from kitforge.core.optim import schedules
from kitforge.core.optim.build import Optimizer
from kitforge.core.optim.schedules import ScheduleConfig, lr_scale
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from tests.core.checkpoint.killed import child
from tests.trainer import tiny
from tests.trainer.regression import Regression, train


class Scripted(Regression):
    """A straight line whose evaluations are told beforehand."""

    def __init__(self, *losses: float) -> None:
        super().__init__()
        self.losses = iter(losses)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"eval/loss": next(self.losses), "eval/accuracy": 0.5}


class Finite(Regression):
    """A straight line whose data end after five steps; steps differ in size."""

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step, micro_batches in zip(range(cursor.step, 5), super().steps(model, cursor), strict=False):
            yield [{name: tensor[: step + 1] for name, tensor in part.items()} for part in micro_batches]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_the_learning_rate_follows_the_schedule(tmp_path: Path, corpus: Path, name: str) -> None:
    choices = {"schedule.name": name, "schedule.warmup_steps": 2, "schedule.final_fraction": 0.2}
    tiny.run(tmp_path, corpus, choices)
    config = ScheduleConfig(name=name, warmup_steps=2, final_fraction=0.2)
    rates = [record["learning_rate"] for record in tiny.records(tmp_path, "train")]
    assert rates == pytest.approx([1e-2 * lr_scale(config, step, 6) for step in range(6)])


def test_a_run_evaluates_about_ten_times_and_a_short_one_at_its_end(tmp_path: Path) -> None:
    wanted = {25: [*range(2, 25, 2), 25], 9: [9]}
    for num_steps, steps_of in wanted.items():
        folder = tmp_path / str(num_steps)
        train(folder, Scripted(*map(float, range(20))), max_steps=num_steps, checkpoint_every=None)
        assert [record["step"] for record in tiny.records(folder, "eval")] == steps_of


def test_a_run_begins_with_what_it_does(tmp_path: Path, corpus: Path) -> None:
    tiny.run(tmp_path, corpus, {"trainer.micro_batch_size": 3, "trainer.max_steps": 2})
    (event,) = (record for record in tiny.records(tmp_path, "event") if record["event"] == "run")
    assert (event["metric_for_best"], event["metric_for_best_mode"]) == ("eval/loss", "min")
    lines = dict(line.split(maxsplit=1) for line in event["message"].splitlines())
    assert list(lines) == ["data", "length", "batch", "parameters", "device", "folder"]
    assert re.fullmatch(r"[\d,]+ tokens, \d+ rows, \d+ evaluation rows", lines["data"])
    assert lines["batch"] == "4 = micro-batch 3 x accumulation 2 x replicas 1"
    assert re.fullmatch(r"([\d,]+) of \1 trained", lines["parameters"])
    assert (lines["device"], lines["folder"]) == ("cpu, fp32", str(tmp_path))


def test_frozen_parameters_are_counted_apart(tmp_path: Path) -> None:
    class Frozen(Regression):
        def build(self, world: World) -> nn.Module:
            model = super().build(world)
            model.append(nn.Linear(1, 2).requires_grad_(False))
            return model.append(nn.Linear(2, 1))

    train(tmp_path, Frozen(), max_steps=1)
    assert "\nparameters  5 of 9 trained (55.56%)\n" in tiny.events(tmp_path, "run")[0]


def test_a_plateau_lowers_the_learning_rate(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "IMPROVEMENT", 0.5)
    tiny.run(tmp_path, corpus, tiny.KINDS["a plateau"] | {"optimizer.learning_rate": 1e-2})
    rates = [record["learning_rate"] for record in tiny.records(tmp_path, "train")]
    # A fall by half is asked for, so every evaluation but the first disappoints; a tenth is the least.
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 2.5e-3, 1.25e-3, 1e-3])
    assert "learning rate times 0.5" in tiny.events(tmp_path, "plateau")[0]


def test_early_stopping_stops_and_gives_back_the_best_weights(tmp_path: Path) -> None:
    task = Scripted(5.0, 3.0, 4.0, 3.5)
    run = train(tmp_path, task, eval_every=1, early_stopping=2, max_steps=9)
    assert tiny.records(tmp_path, "train")[-1]["step"] == 4
    assert "eval/loss was best at step 2 with 3" in tiny.events(tmp_path, "stop")[0]
    best = dict(open_checkpoint(step_folder(tmp_path / "checkpoints", 2)).model())
    assert all(value.equal(best[name]) for name, value in run.model.state_dict().items())
    assert run.metrics["eval/loss"] == 3.0
    assert "weights of step 2" in tiny.events(tmp_path, "restore")[0]


def test_the_figures_of_restored_weights_are_those_of_their_evaluation_even_where_they_are_nan(tmp_path: Path) -> None:
    class Measured(Scripted):
        def evaluate(self, model: nn.Module) -> dict[str, float]:
            loss = next(self.losses)
            return {"eval/loss": loss, "eval/auc": math.nan if loss == 3.0 else 0.5}

    chosen = {"eval_every": 1, "early_stopping": 2, "max_steps": 9}
    metrics = train(tmp_path, Measured(5.0, 3.0, 4.0, 3.5), **chosen).metrics
    resumed = train(tmp_path, Measured(3.5), "auto", **chosen).metrics
    assert [(each["eval/loss"], math.isnan(each["eval/auc"])) for each in (metrics, resumed)] == [(3.0, True)] * 2


def test_the_weights_before_training_can_be_the_best(tmp_path: Path) -> None:
    task = Scripted(1.0, 3.0, 4.0)
    run = train(tmp_path, task, eval_first=True, eval_every=1, early_stopping=2, checkpoint_every=None)
    best = dict(open_checkpoint(step_folder(tmp_path / "checkpoints", 0)).model())
    assert all(value.equal(best[name]) for name, value in run.model.state_dict().items())


def test_what_is_not_measured_is_never_the_best(tmp_path: Path) -> None:
    nan = float("nan")
    train(tmp_path / "never", Scripted(nan, nan, nan), eval_every=1, early_stopping=3, max_steps=9)
    assert "eval/loss is nan" in tiny.events(tmp_path / "never", "best")[0]
    assert "eval/loss was never finite" in tiny.events(tmp_path / "never", "stop")[0]
    train(tmp_path / "once", Scripted(nan, 3.0, nan, 2.0, nan, nan), eval_every=1, early_stopping=2, max_steps=9)
    assert "eval/loss was best at step 4 with 2" in tiny.events(tmp_path / "once", "stop")[0]


@pytest.mark.slow
def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    train(tmp_path, Scripted(5.0, 3.0, 4.0, 3.5), eval_every=1, early_stopping=2, max_steps=9)
    before = tiny.records(tmp_path)
    train(tmp_path, Scripted(3.5), "auto", eval_every=1, early_stopping=2, max_steps=9)
    assert tiny.records(tmp_path) == before


def test_the_best_checkpoint_is_kept_besides_the_last(tmp_path: Path) -> None:
    train(tmp_path, Scripted(5.0, 1.0, 4.0, 3.0, 2.0, 2.0), eval_every=1, save_total_limit=2)
    assert steps(tmp_path / "checkpoints") == [2, 5, 6]


def test_the_best_checkpoint_survives_a_death_while_a_better_one_is_written(
    tmp_path: Path,
) -> None:
    write = saving.write_files

    def die_at_step_4(draft: Path, snapshot: Snapshot, *further: int | None) -> Written:
        if snapshot.step == 4:
            os._exit(9)
        return write(draft, snapshot, *further)

    def run() -> None:
        saving.write_files = die_at_step_4
        train(tmp_path, Scripted(5.0, 1.0, 4.0, 0.5), eval_every=1, save_total_limit=1)

    assert os.waitstatus_to_exitcode(os.waitpid(child(run), 0)[1]) == 9
    root = tmp_path / "checkpoints"
    assert steps(root) == [2, 3]
    assert (step_folder(root, 2) / KEEP).exists()
    train(tmp_path, Scripted(4.0, 4.0, 4.0), "auto", eval_every=1, save_total_limit=1)
    assert steps(root) == [2, 6]


def test_a_resumed_run_protects_its_best_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    train(tmp_path, Scripted(1.0, 2.0, 2.0, 2.0, 2.0, 2.0), eval_every=1, save_total_limit=2)
    # As if it had died before the end, with the protection of its best step taken away.
    shutil.rmtree(step_folder(root, 6))
    (step_folder(root, 1) / KEEP).unlink()
    train(tmp_path, Scripted(2.0), "auto", eval_every=1, save_total_limit=2)
    assert steps(root) == [1, 5, 6]


def test_what_is_best_can_be_the_largest(tmp_path: Path) -> None:
    losses = (1.0, 2.0, 3.0, 2.0, 1.0, 0.0)
    train(tmp_path, Scripted(*losses), eval_every=1, metric_for_best_mode="max", save_total_limit=1)
    assert steps(tmp_path / "checkpoints") == [3, 6]


def test_an_unknown_monitor_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eval/accuracy, eval/loss"):
        train(tmp_path, Scripted(1.0), eval_every=1, metric_for_best="eval/f1")


def test_an_evaluation_can_come_first(tmp_path: Path, corpus: Path) -> None:
    tiny.run(tmp_path, corpus, {"trainer.eval_first": True, "trainer.eval_every": 3})
    assert [record["step"] for record in tiny.records(tmp_path, "eval")] == [0, 3, 6]
    assert tiny.records(tmp_path)[0]["kind"] == "eval"


def test_a_log_line_is_the_mean_over_its_steps_weighted_by_samples(tmp_path: Path) -> None:
    train(tmp_path / "each", Finite(), max_steps=4)
    train(tmp_path / "windows", Finite(), max_steps=4, log_every=4)
    each = [record["loss"] for record in tiny.records(tmp_path / "each", "train")]
    (line,) = tiny.records(tmp_path / "windows", "train")
    weighted = sum(loss * samples for loss, samples in zip(each, (1, 2, 3, 4), strict=True)) / 10
    assert line["loss"] == pytest.approx(weighted, rel=1e-6)
    assert line["loss"] != pytest.approx(sum(each) / 4, rel=1e-3)


@pytest.mark.slow
def test_a_log_line_is_the_mean_over_its_steps_weighted_by_tokens(tmp_path: Path, corpus: Path) -> None:
    packed = {"data.train": "documents.jsonl", "data.eval_fraction": 0.2}
    tiny.run(tmp_path / "each", corpus, packed)
    tiny.run(tmp_path / "windows", corpus, packed | {"trainer.log_every": 3})
    each = tiny.records(tmp_path / "each", "train")
    tokens = [after["tokens"] - before for after, before in zip(each, [0, *(r["tokens"] for r in each)], strict=False)]
    for line, first in zip(tiny.records(tmp_path / "windows", "train"), (0, 3), strict=True):
        steps_of = slice(first, first + 3)
        total = sum(record["loss"] * count for record, count in zip(each[steps_of], tokens[steps_of], strict=True))
        assert line["loss"] == pytest.approx(total / sum(tokens[steps_of]), rel=1e-6)


def test_epochs_and_steps_end_a_run_whichever_comes_first(tmp_path: Path, corpus: Path) -> None:
    long_rows = {"data.sequence_length": 128, "data.batch_size": 8}
    one = tiny.begin(tmp_path / "one", corpus, long_rows | {"trainer.epochs": 1, "trainer.max_steps": None})
    assert one.loop.max_steps == one.loop.task.num_steps(1.0) > 2
    both = tiny.begin(tmp_path / "two", corpus, long_rows | {"trainer.epochs": 1, "trainer.max_steps": 2})
    assert both.loop.max_steps == 2
    more = tiny.begin(tmp_path / "three", corpus, long_rows | {"trainer.epochs": 1, "trainer.max_steps": 1000})
    sizes = [sum(len(part["tokens"]) for part in step) for step in more.loop.task.steps(nn.Module(), Cursor())]
    assert len(sizes) == one.loop.max_steps == more.loop.max_steps
    assert sizes[-1] < 8


def test_a_task_that_cannot_count_its_steps_needs_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer.max_steps"):
        train(tmp_path, max_steps=None)


def test_data_that_end_early_end_the_run(tmp_path: Path) -> None:
    train(tmp_path, Finite(), max_steps=9)
    assert tiny.records(tmp_path, "train")[-1]["step"] == 5
    assert steps(tmp_path / "checkpoints")[-1] == 5


def test_data_that_end_within_a_window_are_logged_all_the_same(tmp_path: Path) -> None:
    train(tmp_path, Finite(), max_steps=9, log_every=3)
    assert [record["step"] for record in tiny.records(tmp_path, "train")] == [3, 5]


def test_a_task_without_a_step_is_refused(tmp_path: Path) -> None:
    class Empty(Regression):
        def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
            return iter(())

    with pytest.raises(TrainingError, match="yielded no step"):
        train(tmp_path, Empty())


def test_optimizer_states_are_laid_down_before_the_first_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(Regression):
        def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
            order.append("loss")
            return super().loss(model, micro_batch)

    monkeypatch.setattr(Optimizer, "init_state", lambda _: order.append("states"))
    train(tmp_path, Watched(), max_steps=1, checkpoint_every=None)
    assert order[0] == "states"


def test_a_straight_line_is_found(tmp_path: Path) -> None:
    run = train(tmp_path, max_steps=200, rate=0.1, checkpoint_every=None, log_every=50)
    slope, offset = (float(parameter.detach()) for parameter in run.model.parameters())
    assert (slope, offset) == pytest.approx((3.0, -1.0), abs=0.02)
    assert run.metrics["loss"] < 0.01
