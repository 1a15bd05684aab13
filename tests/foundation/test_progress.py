"""Long work shows a bar on a terminal and a line every half minute elsewhere; short work leaves nothing."""

import io
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from rich.console import Console
from rich.progress import Progress

from kitforge.foundation import progress
from kitforge.foundation.progress import heartbeat, show_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def plain_console(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=is_terminal, width=80))
    return file


def test_a_pipe_gets_a_line_every_half_minute(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    file = plain_console(monkeypatch)
    with show_progress("rows read") as advance:
        for done in range(1, 100):
            clock[0] += 1.0
            advance(done * 1000, 99_000 if done > 50 else None)
    assert file.getvalue().splitlines() == [
        "rows read: 30,000",
        "rows read: 60,000 of 99,000 (61%)",
        "rows read: 90,000 of 99,000 (91%)",
    ]


def test_short_work_and_work_that_is_to_be_silent_print_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    file = plain_console(monkeypatch)
    with show_progress("prompts answered", 3) as advance:
        clock[0] += 29.0
        advance(3)
    with show_progress("prompts answered", 3, enabled=False) as advance:
        clock[0] += 300.0
        advance(3)
    assert file.getvalue() == ""


def test_a_terminal_shows_a_bar_that_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = plain_console(monkeypatch, is_terminal=True)
    with show_progress("tokenizing", 4) as advance:
        advance(2)
        advance(3, 6)
    assert "tokenizing" in file.getvalue()
    assert "50%" in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_heartbeat_hands_on_what_it_counts(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], is_terminal: bool
) -> None:
    file = plain_console(monkeypatch, is_terminal=is_terminal)

    def batches() -> Iterator[str]:
        for name in "abcd":
            clock[0] += 16.0
            yield name

    outer = Progress(console=progress.console) if is_terminal else nullcontext()
    # On a terminal the bar of an evaluation moves below that of the run.
    with outer:
        assert "".join(heartbeat(batches(), "batches evaluated")) == "abcd"
    text = file.getvalue()
    if is_terminal:
        assert "batches evaluated" in text
    else:
        assert text.splitlines() == ["batches evaluated: 1", "batches evaluated: 3"]
