"""Tokenization of shards into token files, in this process or in several."""

import multiprocessing
import os
import signal
import sys
import threading
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import DataShard, DocumentShard
from kitforge.data.tokenizers.protocol import Tokenizer, document_frame
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, KitforgeError
from kitforge.foundation.files import atomic_file

# A process takes about half a second to start; less text than this is tokenised before it would begin.
_WORTH_PROCESSES = 6 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardJob(ABC):
    """A shard, and the file that is written of it. Can be sent to another process."""

    shard: DataShard
    path: Path  # appears when the file is complete

    @abstractmethod
    def write(self, tokenizer: Tokenizer) -> None:
        """Read and tokenise the shard, and write the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeJob(ShardJob):
    """A shard and the file that will hold its tokens.

    The file is int64 num_documents, int64 tokens of each document, then all tokens. A document begins as the tokenizer
    begins a text and ends with one end token.
    """

    shard: DocumentShard

    def write(self, tokenizer: Tokenizer) -> None:
        dtype = token_dtype(tokenizer.vocab_size)
        before, after = (np.array(tokens, dtype) for tokens in document_frame(tokenizer))
        parts: list[NDArray[np.unsignedinteger]] = []
        lengths: list[int] = []
        for text in self.shard.documents():
            tokens = tokenizer.encode_array(text)
            parts += (before, tokens.astype(dtype, copy=False), after)
            lengths.append(len(before) + len(tokens) + len(after))
        with atomic_file(self.path) as file:
            file.write(np.array([len(lengths), *lengths], dtype=np.int64).tobytes())
            for part in parts:
                file.write(part.data)


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """The smallest of uint16 and uint32 that holds every token."""
    return np.dtype(np.uint16) if vocab_size <= 2**16 else np.dtype(np.uint32)


def run_tokenize_jobs(
    jobs: Sequence[ShardJob], tokenizer: Tokenizer, num_workers: int | None, done: Callable[[int], None]
) -> None:
    """Write the token file of every job; `done` gets the bytes of each shard that is ready.

    With `num_workers` None there are as many processes as cores, or none where the text is too little to pay for them.
    """
    check(num_workers is None or num_workers >= 1, "data.num_workers", num_workers, "at least 1, or null to decide")
    is_little = sum(job.shard.size for job in jobs) < _WORTH_PROCESSES
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    count = min(len(jobs), num_workers or (1 if is_little else num_cores))
    # A class of the user's script cannot reach another process, because the script is not run again there.
    if count <= 1 or multiprocessing.current_process().daemon or type(tokenizer).__module__ == "__main__":
        for job in jobs:
            job.write(tokenizer)
            done(job.shard.size)
        return
    _run_in_processes(jobs, tokenizer, count, done)


def read_job(path: Path, dtype: np.dtype[np.unsignedinteger]) -> tuple[NDArray[np.int64], NDArray[np.unsignedinteger]]:
    """Tokens of each document [num_documents], and all tokens (mapped, not read), of a finished job."""
    num_documents = int(np.fromfile(path, dtype=np.int64, count=1)[0])
    lengths = np.fromfile(path, dtype=np.int64, count=num_documents, offset=8)
    total = int(lengths.sum())
    if total == 0:
        return lengths, np.empty(0, dtype)
    return lengths, np.memmap(path, dtype=dtype, mode="r", offset=8 * (1 + num_documents), shape=(total,))


def _run_in_processes(jobs: Sequence[ShardJob], tokenizer: Tokenizer, count: int, done: Callable[[int], None]) -> None:
    # The largest first and in turn, so that all workers have about as much to do.
    by_size = sorted(jobs, key=lambda job: -job.shard.size)
    workers = [_start(by_size[first::count], tokenizer) for first in range(count)]
    try:
        _follow(dict(workers), done)
    finally:
        for _, process in workers:
            process.terminate()
            process.join()


def _follow(processes: dict[Connection, BaseProcess], done: Callable[[int], None]) -> None:
    """Forward the workers' progress until all have ended; raise their errors."""
    while processes:
        for connection in wait(list(processes)):
            assert isinstance(connection, Connection)
            try:
                report = connection.recv()
            except EOFError:
                process = processes.pop(connection)
                process.join()
                _check_ended_well(process)
                continue
            if isinstance(report, KitforgeError):
                raise report
            done(report)


def _check_ended_well(process: BaseProcess) -> None:
    if process.exitcode != 0:
        raise DataError(
            "a tokenising process has died",
            got=f"exit code {process.exitcode}",
            expected="0; -9 often means that memory ran out",
            fix="run again (finished parts are kept) with fewer processes: data.num_workers=1",
        )


def _start(jobs: Sequence[ShardJob], tokenizer: Tokenizer) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(jobs, tokenizer, writer), daemon=True)
    with _script_hidden():
        process.start()
    writer.close()
    return reader, process


@contextmanager
def _script_hidden() -> Iterator[None]:
    """Keep a new process from running the user's script again: a script of two lines guards nothing by `__main__`."""
    script = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def _work(jobs: Sequence[ShardJob], tokenizer: Tokenizer, reports: Connection) -> None:
    # The terminal's Ctrl-C reaches every process, and the parent ends this one itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        for job in jobs:
            job.write(tokenizer)
            reports.send(job.shard.size)
    except KitforgeError as error:
        reports.send(error)


def _end_with_parent() -> None:
    """A parent that was killed cannot end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
