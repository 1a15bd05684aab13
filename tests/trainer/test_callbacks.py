"""What a run shows and leaves behind: progress, metrics, traces, tracking, samples, the report."""

import builtins
import errno
import io
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
from rich.console import Console

from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.load import newest
from kitforge.core.checkpoint.manifest import steps
from kitforge.foundation.errors import CheckpointError, ConfigError, DependencyError
from kitforge.foundation.files import mark_own
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.report.rank_trace import read_traces
from kitforge.report.step_times import COMPUTE, DATA, HOST, step_times
from kitforge.trainer.callbacks import progress, report_page
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.patience import PATIENCE
from tests.trainer import tiny
from tests.trainer.regression import Regression, train
from tests.trainer.test_course import Scripted


def shown(folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=120, color_system=None)
    monkeypatch.setattr(progress, "console", console)
    train(folder, Scripted(0.25, 0.125), progress=True, eval_every=3)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_terminal_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(tmp_path, monkeypatch, is_terminal=True)
    assert "step 6/6" in text
    assert "samples/s" in text
    assert "step 3  eval/loss 0.2500" in text


TASKS: dict[str, tuple[str, ...]] = {
    "text_generation": ("loss",),
    "grpo": PolicyGradientTask.progress_metrics(cast(PolicyGradientTask, None)),
}


@pytest.mark.parametrize("metrics", TASKS.values(), ids=TASKS)
def test_a_narrow_terminal_keeps_step_bar_clocks_and_the_first_figure(
    monkeypatch: pytest.MonkeyPatch, metrics: tuple[str, ...]
) -> None:
    for width, max_steps in itertools.product((60, 70, 80, 100, 120, 160), (300, 20_000, 2_000_000)):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
        monkeypatch.setattr(progress, "console", console)
        state = SimpleNamespace(cursor=SimpleNamespace(step=0), seconds=12.0)
        run: Any = SimpleNamespace(max_steps=max_steps, state=state, progress_metrics=metrics)
        display = progress.ProgressDisplay()
        display.on_event(Event(kind="start"), run)
        record = {"step": max_steps - 1, "learning_rate": 3e-4, "time/input_tokens_per_second": 17480.0}
        record |= {"time/tokens_per_second": 12345.0} | dict.fromkeys(metrics, 15.9375)
        display.on_event(Event(kind="log", record=record), run)
        display.on_event(Event(kind="end"), run)
        assert isinstance(console.file, io.StringIO)
        line = console.file.getvalue().rpartition("\r")[2].rpartition("\x1b[2K")[2].splitlines()[0]
        words = rf"step {max_steps - 1}/{max_steps} [━╸╺ ]{{4,}} +0:00:00 +(-:--:--|0:00:00) {metrics[0]} 15.9375"
        assert re.match(words, line) and "…" not in line and len(line) <= width, line
        assert width < 160 or "17,480 tokens/s" in line


def test_elsewhere_a_few_plain_lines_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(tmp_path, monkeypatch, is_terminal=False).splitlines()
    assert lines[-2].startswith("step 6/6  loss ")
    assert lines[-1] == "step 6  eval/loss 0.1250  eval/accuracy 0.5000"
    assert not any("\x1b" in line for line in lines)


def test_a_notebook_rewrites_its_line_of_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What rich takes for a notebook: the shell of an IPython kernel among the builtins.
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    displayed: list[str] = []
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    display = ModuleType("IPython.display")
    monkeypatch.setattr(display, "display", lambda one: displayed.append(one.text), raising=False)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    console = Console(file=io.StringIO())
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    train(tmp_path, Scripted(0.25, 0.125), progress=True, eval_every=3)
    assert isinstance(console.file, io.StringIO)
    _, *lines = console.file.getvalue().split("\r")
    assert [line[:8] for line in lines] == [f"step {step}/6" for step in range(1, 7)]
    assert "\n" not in console.file.getvalue() and len({len(line) for line in lines}) == 1
    assert [text[:6] for text in displayed if "eval/loss" in text] == ["step 3", "step 6"]


def test_words_in_brackets_are_shown_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(progress, "console", console)

    class Notes(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "start":
                run.log_event("remark", "see [bold]here[/bold]")

    train(tmp_path, callbacks=[Notes()], progress=True)
    assert isinstance(console.file, io.StringIO)
    assert "see [bold]here[/bold]" in console.file.getvalue()


def test_metrics_are_cut_back_to_the_checkpoint_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    again = tiny.copy_up_to(tmp_path / "whole", tmp_path / "again", 3)
    with open(again / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 7, "lo')
    train(again, resume="auto")
    assert tiny.records(again) == tiny.records(tmp_path / "whole")


def test_a_fresh_start_in_a_folder_without_checkpoints_begins_its_metrics_anew(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": 0, "eval/loss": 1.0}\n', encoding="utf-8")
    mark_own(tmp_path, "train")
    train(tmp_path, resume="auto")
    assert [record["step"] for record in tiny.records(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_a_profile_leaves_a_trace_and_the_ten_dearest(tmp_path: Path) -> None:
    train(tmp_path, profile=True)
    trace = json.loads((tmp_path / "profile" / "trace.json").read_text(encoding="utf-8"))
    assert any("backward" in str(event.get("name")).lower() for event in trace["traceEvents"])
    table = (tmp_path / "profile" / "top_ten.txt").read_text(encoding="utf-8")
    assert "Self CPU" in table
    assert 3 <= sum("aten::" in line or "Optimizer" in line for line in table.splitlines()) <= 10


def test_a_profile_says_where_the_time_of_its_steps_went(tmp_path: Path) -> None:
    train(tmp_path, profile=True, profile_steps=[1, 4])
    (trace,) = read_traces(tmp_path)
    times = step_times([trace])
    assert times.steps == [2, 3, 4] and trace.collectives == []
    assert times.causes.sum(axis=2)[0].tolist() == [end - start for _, start, end in trace.steps[1:]]
    assert times.causes[0, :, [COMPUTE, DATA, HOST]].min() > 0


def test_a_run_shorter_than_its_profile_is_profiled_to_its_end(tmp_path: Path) -> None:
    train(tmp_path, profile=True, max_steps=4)
    assert [number for number, *_ in read_traces(tmp_path)[0].steps] == [3, 4]


@pytest.mark.parametrize("steps", [[3], [5, 5], [0, 2], [1, 2, 3]])
def test_profiled_steps_are_a_first_and_a_later_one(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trainer.profile_steps.*\n.*\n  expected: two steps, the later one last"):
        train(tmp_path, profile_steps=steps)


def test_tracking_without_its_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(DependencyError, match=r"pip install 'kitforge\[tracking\]'"):
        train(tmp_path, wandb="project")


def test_a_run_that_fails_is_no_finished_one_where_it_is_tracked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    fake = SimpleNamespace(init=MagicMock(), log=MagicMock(), finish=lambda exit_code=None: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(tmp_path / "well", Scripted(0.5), max_steps=1, wandb="project")
    with pytest.raises(ConfigError, match="metric_for_best"):
        train(tmp_path / "ill", Scripted(0.5), max_steps=1, wandb="project", metric_for_best="eval/other")
    assert codes == [0, 1]


def test_tensorboard_gets_every_number_under_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", None)
    with pytest.raises(DependencyError, match=r"pip install 'kitforge\[tracking\]'"):
        train(tmp_path / "none", tensorboard=True)
    written: list[tuple[object, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None = None) -> None:
            written.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def flush(self) -> None:
            pass

        def close(self) -> None:
            written.append(("closed",))

    fake = SimpleNamespace(SummaryWriter=SummaryWriter)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", fake)
    train(tmp_path / "run", Scripted(0.5), max_steps=1, tensorboard=True)
    folder = str(tmp_path / "run" / "tensorboard")
    (loss,) = (record["loss"] for record in tiny.records(tmp_path / "run", "train"))
    assert [written[0], written[-1]] == [(folder, None), ("closed",)]
    assert {("loss", loss, 1), ("eval/loss", 0.5, 1)} <= set(written)
    train(tmp_path / "run", Scripted(0.25), "auto", max_steps=2, tensorboard=True, allow_config_changes=True)
    assert (folder, 2) in written and ("eval/loss", 0.25, 2) in written


def test_the_files_of_tensorboard_are_read_by_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, Scripted(0.5), max_steps=2, tensorboard=True)
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("eval/loss")] == [(2, 0.5)]
    assert [each.step for each in found.Scalars("loss")] == [1, 2]


def tracked(folder: Path) -> list[tuple[str, Any]]:
    """What Weights & Biases has kept below a folder: project, name and configuration of the run, then every record."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    kept: list[tuple[str, Any]] = []
    for record in map(Record.FromString, logged(path.read_bytes())):
        if record.HasField("run"):
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            kept.append(("run", (record.run.project, record.run.display_name, config)))
        elif record.HasField("history"):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            kept.append(("record", {name: json.loads(value) for name, value in values.items()}))
    return kept


def logged(data: bytes, block: int = 2**15, head: int = 7) -> Iterator[bytes]:
    """The entries of a log in LevelDB's form: a header, then parts of entries, none of which crosses a block's end."""
    place, entry = head, b""
    while place + head <= len(data):
        if block - place % block < head:
            place += block - place % block
            continue
        start, kind = place + head, data[place + 6]
        place = start + int.from_bytes(data[place + 4 : place + 6], "little")
        entry += data[start:place]
        # Whole, or the last part.
        if kind in (1, 4):
            yield entry
            entry = b""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning:wandb", "ignore::ResourceWarning")
def test_tracking_keeps_every_record_under_its_step_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path / "line", Scripted(1.0), wandb="project", max_steps=2)
    # Its own process writes the file, and on a busy machine is not done when it says so.
    latest = time.monotonic() + PATIENCE
    while len(tracked(tmp_path / "line")) < 3 and time.monotonic() < latest:
        time.sleep(0.1)
    (_, (project, name, config)), *records = tracked(tmp_path / "line")
    assert (project, name, config["trainer"]["max_steps"]) == ("project", "line", 2)
    steps_of = [(record["_step"], "eval/loss" in record) for _, record in records]
    assert steps_of == [(1, False), (2, True)]
    assert [record["loss"] for _, record in records] == [
        each["loss"] for each in tiny.records(tmp_path / "line", "train")
    ]


def test_samples_are_written_at_every_evaluation(tmp_path: Path, corpus: Path) -> None:
    tiny.run(tmp_path, corpus, {"trainer.eval_every": 3, "prompt": ["the ", "a "]})
    for step in (3, 6):
        page = json.loads((tmp_path / "samples" / f"step_{step}.json").read_text(encoding="utf-8"))
        assert page["step"] == step
        assert [sample["prompt"] for sample in page["samples"]] == ["the ", "a "]
        assert all(sample["text"] is not None for sample in page["samples"])


def test_a_report_is_written_while_it_trains_and_loads_itself_anew_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, pages = [0.0], dict[int, str]()
    monkeypatch.setattr(report_page, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Clock(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            page = tmp_path / f"by {run.options.eval_every}" / "report.html"
            if event.kind == "step" and page.exists():
                pages[run.state.cursor.step] = page.read_text(encoding="utf-8")
                page.unlink()
            if event.kind == "step":
                now[0] += 11.0

    # A step takes eleven seconds: a page comes with each evaluation, or after a minute.
    train(tmp_path / "by 4", Scripted(3.0, 2.0, 1.0), max_steps=12, eval_every=4, callbacks=[Clock()])
    assert list(pages) == [5, 9]
    train(tmp_path / "by 12", Scripted(3.0), max_steps=12, eval_every=12, callbacks=[Clock()])
    assert list(pages) == [5, 9, 7]
    assert all("<html data-live=" in page for page in pages.values())
    assert "<html data-live=" not in (tmp_path / "by 12" / "report.html").read_text(encoding="utf-8")


def test_a_report_is_written_at_the_end(tmp_path: Path) -> None:
    train(tmp_path)
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_failing_run_keeps_its_work_and_writes_its_report(tmp_path: Path) -> None:
    class Clumsy(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "step" and run.state.cursor.step == 4:
                raise RuntimeError("dropped it")

    with pytest.raises(RuntimeError, match="dropped it"):
        train(tmp_path / "run", callbacks=[Clumsy()], checkpoint_every=None)
    assert steps(tmp_path / "run" / "checkpoints") == [4]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_failure_within_a_step_saves_nothing_half_done(tmp_path: Path) -> None:
    class Torn(Regression):
        def count(self, step: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().count(step)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Torn(), checkpoint_every=2)
    assert steps(tmp_path / "checkpoints") == [2]


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, num_written = safetensors_file.write, [0]

    def fill_up(*arguments: Any) -> Any:
        num_written[0] += 1
        # Two files a checkpoint: the third checkpoint finds no room.
        if num_written[0] > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments)

    monkeypatch.setattr(safetensors_file, "write", fill_up)
    with pytest.raises(CheckpointError) as caught:
        train(tmp_path)
    assert "No space left on device" in str(caught.value)
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step_2'}" in str(caught.value)
    found = newest(tmp_path / "checkpoints", on_damaged=pytest.fail)
    assert found is not None
    assert found.step == 2
    assert (tmp_path / "report.html").exists()
