"""Functions in forked processes: on one thread, silent, bounded in time, and killed together with their children."""

import copy
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kitforge.foundation.errors import TrainingError
from kitforge.foundation.log import console

# Seconds that a process has to end once its answer is read.
GRACE = 10.0


class Process:
    """`function(*arguments)` in a fork of this process. What it returns or raises is `result()`; both are copied
    through a pipe, so tensors are better left in files. A leader heads a process group of its own."""

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, log: Path | None = None, is_leader: bool = False
    ) -> None:
        fork = multiprocessing.get_context("fork")
        self._answers, sender = fork.Pipe(duplex=False)
        self._is_leader = is_leader
        self._process = fork.Process(target=_run, args=(sender, function, arguments, log, is_leader))
        self._process.start()
        sender.close()
        self.answered = 0.0  # seconds of the monotonic clock of that process, when it had its answer

    def result(self, timeout: float) -> Any:
        """The returned value. Raises what the function raised, with its traceback as the cause, and TrainingError for a
        process that died, or that is killed as it has no answer within `timeout` seconds."""
        try:
            if not self._answers.poll(timeout):
                raise TrainingError("a process has no answer", got=f"nothing within {timeout:g} seconds")
            value, error, trace, self.answered = self._answers.recv()
        except EOFError:
            self._process.join(GRACE)
            raise TrainingError("a process died", got=f"exit code {self._process.exitcode}") from None
        finally:
            self.end()
        if error is not None:
            raise error from RuntimeError(trace)
        return value

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def ended(self, timeout: float) -> bool:
        """Whether it ends with an answer; false if it dies. Raises what the function raised."""
        try:
            self.result(timeout)
        except TrainingError:
            if self._process.exitcode == -signal.SIGKILL:
                return False
            raise
        return True

    def kill(self) -> None:
        """SIGKILL, to a leader and all its descendants."""
        assert self._process.pid is not None
        try:
            (os.killpg if self._is_leader else os.kill)(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            # It has ended.
            return
        self._process.join()

    def end(self) -> None:
        """Let it end by itself if it has answered, else kill it."""
        self._process.join(GRACE if self._answers.poll() else 0)
        self.kill()


def _run(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], log: Path | None, is_leader: bool
) -> None:
    if is_leader:
        os.setsid()
    if log is not None:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (until the process ends)
        console.quiet = True
    faulthandler.enable(sys.__stderr__ or 2)
    # A collection would make all memory of the parent this process's own.
    gc.freeze()
    torch.set_num_threads(1)
    value, error, trace = None, None, ""
    try:
        value = function(*arguments)
    except BaseException as raised:  # noqa: BLE001 (the parent raises it)
        error, trace = raised, traceback.format_exc()
        sys.stderr.write(trace)
        if not isinstance(error, Exception):
            # As SystemExit it would end the parent, too.
            error = RuntimeError(f"{type(error).__name__}: {error}")
        try:
            # Errors that cannot be rebuilt from their arguments cannot be sent.
            copy.copy(error)
        except Exception:  # noqa: BLE001
            error = RuntimeError(f"{type(error).__name__}: {error}")
    try:
        sender.send((value, error, trace, time.monotonic()))
    except Exception:  # noqa: BLE001 (of a value or an error that cannot be pickled)
        words = f"{type(error or value).__name__}: {error or value}"
        sender.send((None, RuntimeError(words), trace, time.monotonic()))


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank, in rank order; what the first failing rank raised is
    raised here, with its traceback as the cause."""
    ranks = [Process(function, rank, *arguments) for rank in range(num_ranks)]
    values, errors = [], list[tuple[float, BaseException]]()
    for rank in ranks:
        try:
            values.append(rank.result(timeout))
        except BaseException as error:  # noqa: BLE001 (the earliest is raised below)
            errors.append((rank.answered or float("inf"), error))
    if errors:
        raise min(errors, key=lambda each: each[0])[1]
    return values


def launched(rank: int, num_ranks: int, port: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` in the environment of a launcher, which `Rendezvous` reads."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | {
        name: str(value) for name, value in values.items()
    }
    return function(*arguments)


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
