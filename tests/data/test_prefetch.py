"""Working ahead changes nothing but the time, and always comes to an end."""

import gc
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from kitforge.data.prefetch import BackgroundPrefetcher
from kitforge.foundation import files
from kitforge.foundation.errors import ConfigError
from tests.patience import PATIENCE


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def num_threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_items_come_in_order(depth: int) -> None:
    with BackgroundPrefetcher(iter(range(20)), depth) as items:
        assert list(items) == list(range(20))
        assert list(items) == []


def test_no_more_than_depth_items_are_made_ahead() -> None:
    made: list[int] = []
    with BackgroundPrefetcher((made.append(number) or number for number in range(100)), depth=3) as items:
        wait_until(lambda: len(made) == 4)
        time.sleep(0.02)
        assert made == [0, 1, 2, 3], "three that are ready and one in hand"
        assert next(items) == 0
        wait_until(lambda: len(made) == 5)


def failing() -> Iterator[int]:
    yield 1
    raise ZeroDivisionError("in the producer")


def test_an_exception_arrives_in_its_turn_with_its_traceback() -> None:
    items = BackgroundPrefetcher(failing())
    assert next(items) == 1
    with pytest.raises(ZeroDivisionError, match="in the producer") as caught:
        next(items)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert list(items) == []


def test_closing_stops_a_producer_that_waits_for_room() -> None:
    before = num_threads()
    finished = threading.Event()

    def endless() -> Iterator[int]:
        try:
            while True:
                yield 1
        finally:
            finished.set()

    items = BackgroundPrefetcher(endless())
    next(items)
    begin = time.monotonic()
    items.close()
    assert time.monotonic() - begin < PATIENCE
    assert finished.is_set(), "the producer must be able to clean up"
    assert num_threads() == before
    items.close()
    assert list(items) == []


def test_closing_does_not_raise_what_nobody_asked_for() -> None:
    items = BackgroundPrefetcher(failing())
    items.close()
    assert list(items) == []


@pytest.mark.slow
def test_a_forgotten_prefetcher_ends_its_thread() -> None:
    before = num_threads()
    items = BackgroundPrefetcher(iter(range(100)))
    next(items)
    del items
    gc.collect()
    wait_until(lambda: num_threads() == before)


@pytest.mark.parametrize("producer", ["itertools.repeat(1)", "iter(threading.Event().wait, 1)"])
def test_the_interpreter_ends_though_nobody_closed(producer: str) -> None:
    script = (
        "import itertools, threading\n"
        "from kitforge.data import prefetch\n"
        "prefetch._JOIN_TIMEOUT_SECONDS = 0.1\n"
        f"items = prefetch.BackgroundPrefetcher({producer})\n"
    )
    checkout = Path(files.__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=checkout, timeout=PATIENCE, check=True)


def test_a_depth_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.prefetch"):
        BackgroundPrefetcher(iter([]), depth=0)
