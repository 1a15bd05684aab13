"""What fails on one rank, wherever it is, ends all of them within seconds and reaches people in its own words."""

import errno
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import multiprocessing, nn

from kitforge.api import Trainer
from kitforge.cli.console import print_error
from kitforge.core.checkpoint import save as saving
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel import launch as launching
from kitforge.core.parallel import micro_batches, rendezvous
from kitforge.core.parallel import rank_errors as failing
from kitforge.core.parallel.rank_errors import (
    LAUNCHED,
    FailureMonitor,
    describe_error,
    reserve_error_file,
    write_error_file,
)
from kitforge.core.parallel.stage import Stages
from kitforge.core.parallel.world import World
from kitforge.foundation import device as devices
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import DataError, TrainingError
from kitforge.foundation.types import Cursor, MicroBatch
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext, can_save_at_end
from kitforge.trainer.callbacks.metrics_file import MetricsFile
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from tests.differential.drawn import WHOLE
from tests.distributed.test_launch import failure
from tests.trainer.regression import Regression

# Seconds; a rank that waits for another would wait far longer than any of these tests may take.
PATIENCE, LIMIT = 3600.0, 600.0
FULL = "No space left on device"
STEP = 3


class Line(Regression):
    """A straight line that saves and evaluates; what goes wrong with it stands in the classes below."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"eval/loss": 1.0}


def is_failing() -> bool:
    """Whether this rank is to fail; it then notes the moment."""
    if os.environ["RANK"] not in os.environ["FAILING"].split(","):
        return False
    Path(f"since-{os.environ['RANK']}").write_text(str(time.time()))
    return True


class BadRow(Line):
    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for number, step in enumerate(super().steps(model, cursor)):
            if number == STEP and is_failing():
                raise DataError("rows 17 of part-00042.parquet cannot be read", got="Input/output error")
            yield step


class NoMemory(Line):
    """In the second evaluation, of a step that is not saved."""

    num_evaluations = 0

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.num_evaluations += 1
        if self.num_evaluations == 2 and is_failing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 32.00 GiB.")
        return super().evaluate(model)


class NoNetwork(Line):
    def build(self, world: Any) -> nn.Module:
        if is_failing():
            raise ValueError("no such layer")
        return super().build(world)


class HungElsewhere(BadRow):
    """The other ranks do not wait for a message but for something of their own."""

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for number, step in enumerate(super().steps(model, cursor)):
            if number == STEP:
                time.sleep(PATIENCE)
            yield step


class FullDisk(Callback):
    """Raises at one kind of event."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == self.kind and (self.kind != "step" or run.state.cursor.step == STEP) and is_failing():
            raise OSError(errno.ENOSPC, FULL)


class FullMetrics(Callback):
    """Puts a full disk under a metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == STEP and is_failing():
            self.path.unlink(missing_ok=True)
            self.path.symlink_to("/dev/full")


class SlowDisk(FullDisk):
    """A write is under way when the rank fails, and will not end."""

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start":
            saving.write_files = lambda *_: time.sleep(PATIENCE)  # type: ignore[assignment]
        super().on_event(event, run)


def train(task: Line | None = None, *callbacks: Callback, **choices: Any) -> None:
    options = {
        "device": "cpu",
        "parallel": {"data": int(os.environ["WORLD_SIZE"]), "timeout": PATIENCE},
        "trainer": {"max_steps": 12, "progress": False, "checkpoint_every": 2, "eval_every": 12} | choices,
    }
    Trainer(task or Line(), output_dir="run", options=options, callbacks=callbacks).train()


def unwritable_metrics() -> None:
    # As many files as ranks, so that each rank writes.
    path = Path(f"metrics-{os.environ['RANK']}.jsonl")
    train(None, FullMetrics(path), MetricsFile(path))


def fails_to_sample() -> None:
    from kitforge.inference.engine import Engine

    generate = Engine.generate

    def no_room(*arguments: Any) -> Any:
        if is_failing():
            raise RuntimeError("no room for 17 blocks")
        return generate(*arguments)

    Engine.generate = no_room  # type: ignore[method-assign]
    train_on_texts({"parallel.data": 2})


def fails_on_a_stage() -> None:
    backward = Stages.backward

    def broken(*arguments: Any) -> None:
        if is_failing():
            raise RuntimeError("the second stage is out of order")
        backward(*arguments)

    Stages.backward = broken  # type: ignore[method-assign]
    train_on_texts({"parallel.pipeline": 2, "trainer.micro_batch_size": 2})


def fails_in_a_slice() -> None:
    run_one = micro_batches._run_one

    def broken(*arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and is_failing():
            raise RuntimeError("the second slice is out of order")
        return run_one(*arguments)

    micro_batches._run_one = broken
    train_on_texts({"parallel.tensor": 2, "parallel.copies": 2})


def train_on_texts(choices: dict[str, Any]) -> None:
    from tests.distributed.training import BASE, LLAMA, write_text

    if os.environ["RANK"] == "0":
        write_text(Path())
    while not Path("text.txt").exists():
        time.sleep(0.01)
    options = {
        **BASE,
        **LLAMA,
        "data.cache": "cache",
        "compile_level": "O0",
        "parallel.timeout": PATIENCE,
        **choices,
    }
    options |= {"trainer.eval_every": 2, "prompt": ["Beautiful "]}
    Trainer("text_generation", options.pop("model"), "text.txt", output_dir="run", options=options).train()


def _rank(rank: int, size: int, port: int, failing: str, does: Callable[[], None], launcher: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()
    Path(str(rank)).mkdir()
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in given.items()}}
    os.environ |= {"FAILING": failing, "TORCH_CPP_LOG_LEVEL": "FATAL"}
    if launcher != "another":
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(Path(str(rank), "error.json").absolute())
    if launcher == "ours":
        os.environ[LAUNCHED] = "1"
    descriptor = os.open(f"{rank}/complaints", os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 2)
    sys.stderr = sys.__stderr__
    sys.excepthook = print_error
    try:
        does()
    except Exception as error:  # noqa: BLE001 (what Python does with an error that nobody catches)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


class Outcome:
    """How the ranks of a test ended."""

    def __init__(self, size: int, codes: list[int | None], seconds: float) -> None:
        self.codes, self.seconds = codes, seconds
        read = [Path(f"{rank}/error.json") for rank in range(size)]
        self.words = [json.loads(path.read_text())["kitforge"] if path.exists() else None for path in read]
        self.complaints = [Path(f"{rank}/complaints").read_text() for rank in range(size)]

    def told(self) -> str:
        """What our own launcher makes of it."""
        failures = {rank: failure(code or 0, 0, self.words[rank]) for rank, code in enumerate(self.codes)}
        with pytest.raises(TrainingError) as caught:
            launching._exit_code(failures, Path())
        return str(caught.value)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, for ranks that look more often at each other."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(failing, "LOOK", 0.05)
    monkeypatch.setattr(rendezvous, "LOOK", 0.05)


def run_failing(size: int, failing: str, does: Callable[[], None], launcher: str = "ours") -> Outcome:
    """Ranks that are forked from here with the environment of a launcher, and of which some are to fail; a launcher
    would now end the others, but nobody does, so that they have to end by themselves."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_rank, args=(rank, size, port, failing, does, launcher), daemon=True)
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    until = time.monotonic() + 3 * LIMIT
    for process in ranks:
        process.join(max(0.0, until - time.monotonic()))
    ended = time.time()
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    began = min(float(path.read_text()) for path in Path().glob("since-*"))
    # To be seen with `pytest -s`.
    sys.stdout.write(f"{size} ranks ended {ended - began:.1f} s after the failure\n")
    return Outcome(size, codes, ended - began)


CASES: dict[str, tuple[int, str, Callable[[], None], str]] = {
    "a callback of the first of two": (2, "0", lambda: train(None, FullDisk("step")), FULL),
    "a callback of the second of two": (2, "1", lambda: train(None, FullDisk("step")), FULL),
    "a callback of the first of four": (4, "0", lambda: train(None, FullDisk("step")), FULL),
    "a callback of the second of four": (4, "1", lambda: train(None, FullDisk("step")), FULL),
    "a callback at the start": (2, "1", lambda: train(None, FullDisk("start")), FULL),
    "a callback at the end": (2, "1", lambda: train(None, FullDisk("end"), eval_every=5), FULL),
    "a full disk under metrics of one of four": (4, "1", unwritable_metrics, FULL),
    "a row that cannot be read": (2, "1", lambda: train(BadRow()), "rows 17 of part-00042.parquet cannot be read"),
    "no memory for an evaluation": (2, "1", lambda: train(NoMemory(), eval_every=3), "Tried to allocate 32.00 GiB"),
    "a network that cannot be built": (2, "1", lambda: train(NoNetwork()), "ValueError: no such layer"),
    "no room for samples": (2, "1", fails_to_sample, "no room for 17 blocks"),
    "a stage, while the other waits for its gradient": (2, "1", fails_on_a_stage, "the second stage is out of order"),
    "a slice, while the other waits for its turn": (2, "1", fails_in_a_slice, "the second slice is out of order"),
    "another that waits for something else": (2, "1", lambda: train(HungElsewhere()), "rows 17 of part-00042"),
    "a write that does not end": (2, "1", lambda: train(None, SlowDisk("step")), FULL),
}


# Where the failure is, rather than on which rank, in the gate.
LEFT_OUT = ("a callback of the first of two", "a callback of the second of four", "a callback at the end")


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("case", [case for case in CASES if WHOLE or case not in LEFT_OUT])
def test_a_failure_on_one_rank_ends_all_and_is_told_in_its_own_words(case: str) -> None:
    size, failing, does, words = CASES[case]
    outcome = run_failing(size, failing, does)
    assert outcome.seconds < LIMIT
    told = outcome.told()
    assert told.startswith(f"rank {failing}: ")
    assert words in told
    for rank, said in enumerate(outcome.words):
        assert outcome.codes[rank] == 1
        if str(rank) != failing:
            assert said["words"].startswith(f"rank {failing} failed: ")
            assert words in said["words"]
            assert not said["is_cause"]


@pytest.mark.slow
def test_of_two_that_fail_at_once_the_first_is_told() -> None:
    outcome = run_failing(2, "0,1", lambda: train(None, FullDisk("step")))
    assert outcome.seconds < LIMIT
    assert outcome.codes == [1, 1]
    # Each of them says its own words, and none those of the other.
    assert [said["is_cause"] for said in outcome.words] == [True, True]
    assert FULL in outcome.told()


@pytest.mark.slow
def test_under_another_launcher_people_hear_the_cause_and_who_it_was() -> None:
    outcome = run_failing(2, "1", lambda: train(BadRow()), launcher="torchrun")
    assert outcome.seconds < LIMIT
    assert "rank 1: rows 17 of part-00042.parquet cannot be read" in outcome.complaints[1]
    assert "rank 0: rank 1 failed: rows 17 of part-00042.parquet cannot be read" in outcome.complaints[0]


@pytest.mark.slow
def test_a_rank_that_its_watch_ends_says_the_same_where_no_launcher_has_named_a_file() -> None:
    outcome = run_failing(2, "1", lambda: train(HungElsewhere()), launcher="another")
    assert outcome.complaints[0] == "error: rank 0: rank 1 failed: rows 17 of part-00042.parquet cannot be read\n"
    assert outcome.words == [None, None]


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_both_after_the_same_step() -> None:
    class Interrupted(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "step" and run.state.cursor.step == STEP and is_failing():
                os.kill(os.getpid(), signal.SIGINT)
            if event.kind == "end":
                Path(f"{run.world.rank}/end").write_text(f"{run.state.cursor.step} {run.stop_reason} {event.is_clean}")

    outcome = run_failing(2, "1", lambda: train(None, Interrupted(), checkpoint_every=100))
    assert outcome.codes == [0, 0]
    assert [Path(f"{rank}/end").read_text() for rank in range(2)] == [f"{STEP + 1} interrupted True"] * 2
    assert steps(Path("run/checkpoints")) == [STEP + 1]


class OneFailure:
    """Stands for the store of ranks one of which has failed; NCCL needs GPUs, the watch does not."""

    def check(self, names: list[str]) -> bool:
        return True

    def get(self, name: str) -> bytes:
        return json.dumps({"rank": 3, "words": "no room"}).encode()


def blocked_in_a_kernel(folder: Path, aborts: bool, words: str | None) -> None:
    """The host waits in `.cpu()` for a kernel that waits for a rank which has failed."""
    path = folder / "error.json"
    os.environ |= {"TORCHELASTIC_ERROR_FILE": str(path), LAUNCHED: "1"}
    failing.GRACE = 0.5
    watch = FailureMonitor(OneFailure(), rank=0)  # type: ignore[arg-type]
    if words is not None:
        watch.report(words)
    while aborts and not path.exists():
        time.sleep(0.01)
    if aborts:
        # As the watchdog of NCCL does when a connection is lost, without a word.
        faulthandler.disable()
        os.abort()
    time.sleep(PATIENCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aborts", "code", "words"),
    [
        (True, -signal.SIGABRT, None),
        (False, 1, None),
        (False, 1, "rank 1 died or hung\n  got:      no word: waited 5 s"),
    ],
)
def test_the_watch_says_who_failed_before_a_watchdog_may_abort_and_ends_the_rank_without_one(
    aborts: bool, code: int, words: str | None, tmp_path: Path
) -> None:
    process = multiprocessing.get_context("fork").Process(target=blocked_in_a_kernel, args=(tmp_path, aborts, words))
    process.start()
    process.join(LIMIT)
    assert process.exitcode == code
    said = json.loads((tmp_path / "error.json").read_text())["kitforge"]
    assert (said["words"], said["is_cause"]) == (words or "rank 3 failed: no room", False)
    # This rank itself has no error, and none is made up.
    assert "NoneType" not in (tmp_path / "error.json").read_text()


def test_what_a_rank_says_of_itself_is_not_replaced_by_what_another_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def said(words: str, *, is_cause: bool) -> tuple[str, float]:
        write_error_file(words, "", is_cause=is_cause)
        written = json.loads((tmp_path / "error.json").read_text())["kitforge"]
        return written["words"], written["time"]

    assert said("rank 1 failed", is_cause=False)[0] == "rank 1 failed"
    first = said("no room", is_cause=True)
    assert first[0] == "no room"
    # Said again, it was first said then.
    assert said("no room", is_cause=True) == first
    assert said("rank 1 failed", is_cause=False) == first
    assert said("another error", is_cause=True)[0] == "another error"


def test_a_full_disk_has_room_for_what_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    reserve_error_file()
    (room,) = tmp_path.iterdir()
    assert room.stat().st_size >= 2**16
    write = failing.write_text

    def in_what_is_free(path: Path, text: str) -> None:
        assert not room.exists()
        write(path, text)

    monkeypatch.setattr(failing, "write_text", in_what_is_free)
    write_error_file(FULL, "trace", is_cause=True)
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


@pytest.mark.parametrize(
    ("kinds", "level"), [(["cpu"], "FATAL"), (["cpu", "mps"], "FATAL"), (["cpu", "cuda"], "ERROR")]
)
def test_the_watchdog_of_nccl_is_heard_where_there_may_be_one(
    kinds: list[str], level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL", raising=False)
    monkeypatch.setattr(devices, "available", lambda: kinds)
    with launching._launch_environment(2):
        assert os.environ["TORCH_CPP_LOG_LEVEL"] == level
    assert "TORCH_CPP_LOG_LEVEL" not in os.environ
    with pytest.raises(TrainingError, match="(?s)rank 0 was killed by SIGABRT.*watchdog of NCCL"):
        launching._exit_code({0: failure(-signal.SIGABRT, 5)}, tmp_path)


def test_the_first_error_is_raised_and_what_fails_after_it_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "end":
                ends.append(event.is_clean)
                raise OSError(errno.ENOSPC, "no room for the report")

    ends: list[bool] = []

    def begin(task: Line) -> None:
        options = {"device": "cpu", "trainer": {"max_steps": 4, "progress": False}}
        Trainer(task, output_dir=tmp_path / "run", options=options, callbacks=[Broken(), Broken()]).train()

    class Bad(Line):
        def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Any:
            raise DataError("a bad row")

    with pytest.raises(DataError, match="a bad row"):
        begin(Bad())
    assert (ends, caplog.text.count("no room for the report")) == ([False, False], 2)
    # An error at a clean end leaves the other callbacks an end that is none.
    with pytest.raises(OSError, match="no room for the report"):
        begin(Line())
    assert ends[2:] == [True, False]


def test_others_are_told_before_callbacks_hear_of_the_end() -> None:
    class Told:
        def publish(self, error: BaseException) -> None:
            heard.append(str(error))

    class Ends(FullDisk):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "step":
                raise DataError("a bad row")
            if event.kind == "end":
                heard.append("end")

    heard: list[str] = []
    world = World(device=torch.device("cpu"), failure_monitor=Told())  # type: ignore[arg-type]
    with pytest.raises(DataError):
        Loop(Line(), from_dict(RunOptions, {"trainer": {"max_steps": 2}}), world, callbacks=[Ends("step")]).train()
    assert heard == ["a bad row", "end"]


@pytest.mark.parametrize(
    ("is_clean", "is_settled", "all_ranks", "can_save"),
    [
        (True, True, "ranks", True),
        (False, True, "ranks", False),
        (False, True, None, True),
        (False, False, None, False),
        (True, False, "ranks", False),
    ],
)
def test_ranks_save_together_at_a_clean_end_only(
    is_clean: bool, is_settled: bool, all_ranks: str | None, can_save: bool
) -> None:
    run: Any = SimpleNamespace(
        state=SimpleNamespace(is_consistent=is_settled), world=SimpleNamespace(all_ranks=all_ranks)
    )
    assert can_save_at_end(Event(kind="end", is_clean=is_clean), run) == can_save
    assert not can_save_at_end(Event(kind="evaluate"), run)


def test_one_process_still_saves_when_a_callback_fails(tmp_path: Path) -> None:
    class Bad(Callback):
        def on_event(self, event: Event, run: RunContext) -> None:
            if event.kind == "step" and run.state.cursor.step == STEP:
                raise OSError(errno.ENOSPC, FULL)

    options = {"device": "cpu", "trainer": {"max_steps": 9, "progress": False, "checkpoint_every": 100}}
    with pytest.raises(OSError, match=FULL):
        Trainer(Line(), output_dir=tmp_path / "run", options=options, callbacks=[Bad()]).train()
    assert steps(tmp_path / "run" / "checkpoints") == [STEP]


def test_a_lack_of_memory_is_no_mistake_of_ours() -> None:
    for error in (torch.OutOfMemoryError("CUDA out of memory"), MemoryError()):
        assert "trainer.micro_batch_size" in describe_error(error)
    assert "mistake in Kitforge" in describe_error(ValueError("x"))
