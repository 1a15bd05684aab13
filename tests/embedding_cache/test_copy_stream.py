"""Rows that move on a stream of their own: a stand-in for a GPU, whose copies run no earlier than they must."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.embedding_cache.tiers import device as device_file
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation.device import CopyStream, copy_to
from tests.embedding_cache.training import Case, assert_same_bits, run, uncached

_current = threading.local()


class LateStream:
    """A stream of which work is done when the next one of its calls, or a wait for it, needs that."""

    num_late = 0
    is_idle = False

    def __init__(self, _device: torch.device) -> None:
        self._lock = threading.RLock()
        self._pending: list[Callable[[], None]] = []

    @contextmanager
    def copying(self) -> Iterator[None]:
        with self._lock:
            self.wait()
            _current.stream = self
            try:
                yield
            finally:
                _current.stream = None

    def wait(self) -> None:
        with self._lock:
            while self._pending:
                self._pending.pop(0)()

    def queue(self, work: Callable[[], None]) -> None:
        self._pending.append(work)
        LateStream.num_late += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device tiers with such a stream: rows arrive as late as they may."""
    kernels = select_table()

    def copy_rows(source: Tensor, target: Tensor, *, at: Tensor | None = None, to: Tensor | None = None) -> None:
        stream = getattr(_current, "stream", None)
        if stream is None or at is not None:
            kernels.copy_rows(source, target, at=at, to=to)
        else:
            # The source may be used again at once, as with a copy that has left for pinned memory.
            own = source.clone()
            stream.queue(lambda: kernels.copy_rows(own, target, to=to))

    monkeypatch.setattr(LateStream, "num_late", 0)
    monkeypatch.setattr(device_file, "CopyStream", LateStream)
    monkeypatch.setattr(device_file, "select_table", lambda *_: replace(kernels, copy_rows=copy_rows))


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["host", "host_file", "file"])
@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_rows_that_come_late_are_waited_for(
    tiers: str, optimizer: str, is_mixed: bool, late: None, tmp_path: Path
) -> None:
    case = Case(tiers=tiers, optimizer=optimizer, is_mixed=is_mixed)
    assert_same_bits(run(case, tmp_path), uncached(optimizer, is_mixed))
    assert LateStream.num_late > 0


def test_rows_that_are_not_waited_for_show(late: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(DeviceTier, "slab", property(lambda tier: tier._slab))
    case = Case(tiers="host")
    with pytest.raises(AssertionError):
        assert_same_bits(run(case, tmp_path), uncached(case.optimizer))


def test_the_stream_of_a_cpu_does_nothing_and_copies_stay() -> None:
    stream, tensor = CopyStream(torch.device("cpu")), torch.arange(3)
    with stream.copying():
        stream.wait()
    assert copy_to(tensor, torch.device("cpu")) is tensor


class _Events(list[Any]):
    """What a stand-in for torch.cuda was asked for, in order."""

    def stream(self, name: str) -> Any:
        events = self

        class Stream:
            def wait_stream(self, other: Any) -> None:
                events.append(f"{name} waits for {other.name}")

        Stream.name = name  # type: ignore[attr-defined]
        return Stream()


def test_copies_wait_for_computation_and_computation_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _Events()
    compute = events.stream("compute")

    @contextmanager
    def current(stream: Any) -> Iterator[None]:
        events.append(f"on {stream.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: events.stream("copies"))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute)
    monkeypatch.setattr(torch.cuda, "stream", current)
    stream = CopyStream(torch.device("cuda"))
    with stream.copying():
        events.append("copy")
    assert not stream.is_idle
    stream.wait()
    # Nothing else has been queued, so that nothing waits again.
    assert stream.is_idle
    assert events == ["copies waits for compute", "on copies", "copy", "compute waits for copies"]
