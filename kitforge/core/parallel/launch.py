"""Starts the ranks of a run on this machine with torch's elastic launcher; one exit status, at most one message."""

import logging
import math
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rank_errors import INTERRUPTED, LAUNCHED, RESUME
from kitforge.foundation import device as devices
from kitforge.foundation.errors import KitforgeError, TrainingError

PROGRAM = ("-m", "kitforge")
# Signals that torch's launcher handles and does not restore.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# A rank that died this many seconds after the first error was ended by the launcher.
DRAIN_SECONDS = 3.0
LAST_LINES = 20


class RankError(Exception):
    """The traceback of a rank as text, the cause of the error that the launcher raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The error report of a rank."""

    rank: int
    words: str
    trace: str
    time: float
    is_cause: bool


def launch(
    arguments: Sequence[str], degrees: ParallelConfig, num_ranks: int | None = None, *, program: Sequence[str] = PROGRAM
) -> int:
    """Run `python -m kitforge <arguments>` as `num_ranks` ranks, by default those of the degrees; the exit status.

    Output of ranks other than 0 is shown only if one of them fails. Ctrl-C sends one SIGINT to every rank, which has
    `degrees.timeout` seconds to save. Raises KitforgeError with the message of the rank that failed first.
    """
    num_ranks = num_ranks or degrees.world_size
    with tempfile.TemporaryDirectory(prefix="kitforge-") as folder, _launch_environment(num_ranks):
        start = elastic_launch(_config(degrees, num_ranks, folder), sys.executable)
        try:
            # The launcher would expand a $.
            start(*program, *(argument.replace("$", "$$") for argument in arguments))
        except SignalException:
            return INTERRUPTED
        except ChildFailedError as error:
            return _exit_code(error.failures, Path(folder))
        except RendezvousError as error:
            raise TrainingError("the ranks cannot be started", got=error, fix="see that localhost resolves") from error
    return 0


def _config(degrees: ParallelConfig, num_ranks: int, folder: str) -> LaunchConfig:
    silent = dict.fromkeys(range(1, num_ranks), Std.ERR)
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=silent, local_ranks_filter={0}),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=degrees.restarts,
        monitor_interval=0.1,
        shutdown_timeout=math.ceil(degrees.timeout),
    )


def _exit_code(failures: Mapping[int, ProcessFailure], folder: Path) -> int:
    """The exit status of interrupted ranks. Raises the error of the rank that failed first."""
    reports = {rank: failure.error_file_data.get("kitforge") for rank, failure in failures.items()}
    words = sorted(
        (RankReport(rank=rank, **report) for rank, report in reports.items() if report is not None),
        key=lambda word: word.time,
    )
    first = words[0].time if words else math.inf
    dead = [
        (failure.timestamp, rank)
        for rank, failure in failures.items()
        if all(word.rank != rank for word in words)
        and failure.exitcode not in (-signal.SIGTERM, INTERRUPTED)
        and failure.timestamp <= first + DRAIN_SECONDS
    ]
    if causes := [word for word in words if word.is_cause]:
        is_shared = len(causes) > 1 and len({word.words for word in causes}) == 1
        who = "every rank" if is_shared else f"rank {causes[0].rank}"
        raise TrainingError(f"{who}: {causes[0].words}") from RankError(causes[0].trace)
    if dead:
        rank = min(dead)[1]
        raise _death(rank, failures[rank], folder)
    if words:
        raise TrainingError(words[0].words) from RankError(words[0].trace)
    if any(failure.exitcode == INTERRUPTED for failure in failures.values()):
        return INTERRUPTED
    raise TrainingError(f"rank {min(failures)} was ended from outside", fix="resume=auto goes on")


def _death(rank: int, failure: ProcessFailure, folder: Path) -> KitforgeError:
    if failure.exitcode >= 0:
        problem, fix = f"rank {rank} exited with status {failure.exitcode} and wrote no error report", RESUME
    else:
        problem = f"rank {rank} was killed by {failure.signal_name()}"
        fix = "resume=auto goes on from the last checkpoint"
    if failure.exitcode == -signal.SIGABRT:
        fix = f"the watchdog of NCCL does so when another rank hangs; its lines tell which collective; {fix}"
    if failure.exitcode == -signal.SIGKILL:
        fix = f"it often means that the machine ran out of memory; {fix}"
    files = sorted(folder.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda path: int(path.parts[-3].split("_")[1]))
    lines = files[-1].read_text(errors="replace").splitlines() if files else []
    return TrainingError(problem, got="\n            ".join(lines[-LAST_LINES:]) or None, fix=fix)


@contextmanager
def _launch_environment(num_ranks: int) -> Iterator[None]:
    """The environment of the ranks and a silent launcher, restored afterwards."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    has_gloo_alone = all(devices.BACKENDS.get(kind, "gloo") == "gloo" for kind in devices.available())
    wanted = {
        LAUNCHED: "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores // num_ranks))),
        # A broken connection is told in words; torch's own lines about it would come on top. But why the watchdog of
        # NCCL aborts a process stands nowhere else.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL" if has_gloo_alone else "ERROR"),
    }
    before = dict(os.environ)
    is_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if is_main_thread else {}
    elastic = logging.getLogger("torch.distributed.elastic")
    silence, propagated = logging.NullHandler(), elastic.propagate
    os.environ.update(wanted)
    elastic.addHandler(silence)
    elastic.propagate = False
    try:
        yield
    finally:
        elastic.propagate = propagated
        elastic.removeHandler(silence)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(before)
