"""Warnings of the package are shown once, and noted for every run."""

import logging

import pytest

from kitforge.foundation import log

WORDS = "rows without a label are left out"


def forget_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process that sets up no logging; pytest adds its own handlers when a test begins."""
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(log, "_warned", set[str]())


def test_a_noted_warning_is_shown_once_and_noted_by_every_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_handlers(monkeypatch)
    for _ in range(2):
        with log.noting_warnings() as outer, log.noting_warnings() as notes:
            log.warn_once(log.logger("kitforge.data"), WORDS)
        assert (outer, notes) == ([WORDS], [WORDS])
    assert capsys.readouterr().err.count(WORDS) == 1


def test_a_program_with_a_handler_shows_a_noted_warning_by_that_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_handlers(monkeypatch)
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.root.addHandler(handler)
    with log.noting_warnings():
        log.warn_once(log.logger("kitforge.data"), WORDS)
    assert found == [WORDS] and not capsys.readouterr().err
