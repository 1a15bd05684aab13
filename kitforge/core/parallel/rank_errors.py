"""Errors of ranks: propagation to the other ranks, to the launcher and to the user."""

import errno
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from kitforge.foundation.errors import KitforgeError, PeerError
from kitforge.foundation.files import write_text

# Set by `launch`, whose parent process reports errors to the user.
LAUNCHED = "KITFORGE_LAUNCHED"
RESUME = "its own message says why; resume=auto goes on from the last checkpoint"
# Exit status of an interrupted rank.
INTERRUPTED = 130
# Seconds between two looks at whether a rank failed, and that ranks are given to end by themselves after it: a failure
# has reached everybody within the sum of both.
LOOK, GRACE = 0.5, 3.0
# The same after the loss of the store, which may mean that rank 0 ended normally and this rank is about to.
STORE_GRACE = 5.0
# Seconds that a failing process waits for its threads.
EXIT_GRACE = 1.0

# Bytes that are kept free for the error file, as a full disk is what it often has to tell of; and under which name.
RESERVED_BYTES, RESERVED_NAME = 2**16, "room"

# The rank and its monitor thread both use the error file.
_file_lock = threading.Lock()


def explain(
    error: BaseException, *, waited: float | None = None, silent: list[int] | None = None
) -> KitforgeError | None:
    """A message for an error of torch.distributed; None for other errors, which are this rank's own."""
    if not isinstance(error, dist.DistError) and not (isinstance(error, RuntimeError) and "gloo" in str(error)):
        return None
    who = f"rank {', '.join(map(str, silent))}" if silent else "another rank"
    if not is_timeout(error):
        return PeerError(f"{who} died", got="its connection closed", fix=RESUME)
    seconds = "as long as parallel.timeout allows" if waited is None else f"{waited:g} s"
    return PeerError(f"{who} died or hung", got=f"no word: waited {seconds}", fix=RESUME)


def describe_error(error: BaseException) -> str:
    """The message of an error that ends the process."""
    if isinstance(error, KitforgeError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, OSError):
        words = f"{error.filename or 'this machine'}: {error.strerror or error}"
        is_full = error.errno == errno.ENOSPC
        fix = "free some space, then go on with resume=auto" if is_full else "check the path, and that it may be used"
        return f"{words}\n  do:       {fix}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        fix = "lower trainer.micro_batch_size or data.batch_size, or set trainer.activation_checkpointing=full"
        return f"{type(error).__name__}: {error}\n  do:       {fix}"
    return f"{type(error).__name__}: {error}\n  do:       this is a mistake in Kitforge; --traceback shows where"


def write_error_file(words: str, trace: str, *, is_cause: bool) -> None:
    """Write the error of this rank to the error file of the launcher, if there is one. An error caused by another rank
    never replaces the rank's own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    with _file_lock, suppress(OSError, ValueError):
        before = json.loads(Path(path).read_bytes())["kitforge"] if Path(path).exists() else {}
        if before.get("is_cause") and not is_cause:
            return
        # Of equal reports the first time counts, as the launcher looks for the first failure.
        now = before["time"] if before.get("words") == words else time.time()
        # The shape that torch's own launcher reads, and below `kitforge` what ours does.
        extra = {"py_callstack": trace or words, "timestamp": str(int(now))}
        content = {
            "message": {"message": words, "extraInfo": extra},
            "kitforge": {"words": words, "trace": trace, "time": now, "is_cause": is_cause},
        }
        Path(path).with_name(RESERVED_NAME).unlink(missing_ok=True)
        write_text(Path(path), json.dumps(content))


def reserve_error_file() -> None:
    """Reserve disk space for `write_error_file`."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):
            Path(path).with_name(RESERVED_NAME).write_bytes(bytes(RESERVED_BYTES))


def write_rank_report(words: str, trace: str, *, is_cause: bool) -> bool:
    """Write the error file of a failing rank. Returns whether this rank also reports to the user: not under `launch`,
    and under another launcher only one rank of each machine."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return True
    write_error_file(words, trace, is_cause=is_cause)
    return LAUNCHED not in os.environ and _is_first_report(words, Path(path).parent.parent)


def report_error(error: BaseException, words: str) -> bool:
    """`write_rank_report` for an error that ends this rank."""
    return write_rank_report(words, _trace(error), is_cause=not isinstance(error, PeerError))


def first_failure(store: Store) -> dict[str, Any] | None:
    """The rank that reported a failure first, and its message."""
    if not store.check(["failure"]):
        return None
    first: dict[str, Any] = json.loads(store.get("failure"))
    return first


def publish_failure(store: Store, rank: int, words: str) -> None:
    """Report a failure of this rank unless another rank has reported one."""
    store.compare_set("failure", "", json.dumps({"rank": rank, "words": words.split("\n")[0]}))


class FailureMonitor:
    """Publishes a failure of this rank, and ends this process after a failure of any rank or the loss of the store, if
    it does not end by itself. Otherwise it could wait in a collective forever.

    It has its own thread and store connection, so that it works while the process waits in C++ for another rank. The
    NCCL watchdog may abort the process once a connection is lost, so the error file is written as soon as a failure is
    known.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._left = threading.Event()
        self._own: BaseException | None = None
        self._words: str | None = None  # of this rank's failure by another
        self.first: dict[str, Any] | None = None  # the first failure of any rank, once it is known
        reserve_error_file()
        threading.Thread(target=self._poll, name="kitforge-watch", daemon=True).start()

    def publish(self, error: BaseException) -> None:
        """Report a failure of this rank to the launcher and the other ranks at once, unless another rank caused it."""
        if isinstance(error, PeerError) or explain(error) is not None or self._own is not None:
            return
        self._own = error
        words = describe_error(error)
        if not isinstance(error, KeyboardInterrupt):
            write_error_file(words, _trace(error), is_cause=True)
        with suppress(dist.DistError):
            publish_failure(self._store, self._rank, words)

    def report(self, words: str) -> None:
        """Report to the launcher in full how another rank made this one fail, before others repeat its first line."""
        self._words = words
        write_error_file(words, "", is_cause=False)

    def end(self, *, failed: bool = False) -> None:
        """Stop monitoring. A failing process still has a time limit: Python would wait for threads that write to disk,
        or for ranks that have ended."""
        self._left.set()
        if failed:
            sys.excepthook = partial(self._exit_soon, sys.excepthook)

    def _poll(self) -> None:
        words, grace = None, GRACE
        while words is None:
            if self._left.wait(LOOK):
                return
            try:
                self.first = first_failure(self._store)
                words = None if self.first is None else f"rank {self.first['rank']} failed: {self.first['words']}"
            except dist.DistError:
                words, grace = "the process that the ranks meet at is gone", STORE_GRACE
        write_error_file(self._words or words, "", is_cause=False)
        if self._left.wait(grace):
            return
        words = (self._words or words) if self._own is None else describe_error(self._own)
        if write_rank_report(words, "" if self._own is None else _trace(self._own), is_cause=self._own is not None):
            sys.stderr.write(f"error: rank {self._rank}: {words}\n")
            sys.stderr.flush()
        self._exit()

    def _exit_soon(self, hook: Callable[..., Any], *error: Any) -> None:
        hook(*error)
        timer = threading.Timer(EXIT_GRACE, self._exit)
        timer.daemon = True
        timer.start()

    def _exit(self) -> None:
        os._exit(INTERRUPTED if isinstance(self._own, KeyboardInterrupt) else 1)


def is_timeout(error: BaseException) -> bool:
    """Whether the error is a time-out."""
    return any(words in str(error).lower() for words in ("timed out", "timeout"))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _is_first_report(words: str, folder: Path) -> bool:
    """Whether no other rank of this machine has reported the same error, by the folder of the launcher."""
    try:
        (folder / f"told-{hashlib.sha256(words.encode()).hexdigest()[:16]}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
