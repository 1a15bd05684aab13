"""`kitforge chat` at a terminal: a pseudo-terminal stands for it."""

import contextlib
import os
import pty
import select
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kitforge.cli import chat as module
from tests.patience import PATIENCE


class Talker:
    """Says how many messages it was shown, in pieces, one of which would clear the screen."""

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        yield f"{len(messages)} of them, "
        yield "\x1b[2Jlast: " + messages[-1]["content"]


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The other end of what the chat takes for its terminal."""
    for name, value in {"load_model": str, "load_processor": str}.items():
        monkeypatch.setattr(module, name, lambda *given, value=value: value(given[0]))
    ours, theirs = pty.openpty()
    with open(os.dup(theirs), encoding="utf-8") as typed, open(theirs, "w", encoding="utf-8") as shown:
        monkeypatch.setattr(sys, "stdin", typed)
        monkeypatch.setattr(sys, "stdout", shown)
        try:
            yield ours
        finally:
            # Whoever still reads from the terminal is told that it is gone.
            os.close(ours)


def until(ours: int, words: str) -> str:
    """What the terminal shows up to these words."""
    seen = b""
    while words.encode() not in seen:
        assert select.select([ours], [], [], 20)[0], seen
        seen += os.read(ours, 4096)
    return seen.decode()


def test_a_conversation_is_shown_prompted_and_ended_by_its_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with terminal(monkeypatch) as ours:
        kit = SimpleNamespace(load_dtype=lambda _: "auto", open_pipeline=lambda *_: Talker())
        chosen: Any = SimpleNamespace(kit=kit, options=SimpleNamespace(checkpoint="run", device="cpu"))
        ends: list[int] = []
        chat = threading.Thread(target=lambda: ends.append(module.chat(chosen)), daemon=True)
        chat.start()
        until(ours, "> ")
        os.write(ours, "grüß dich\n".encode())
        reply = until(ours, "\n> ")
        assert "1 of them, " in reply and "last: grüß dich" in reply
        # What a model writes may not move the cursor nor clear the screen.
        assert "\x1b" not in reply
        os.write(ours, b"again\n")
        assert "3 of them" in until(ours, "\n> ")
        os.write(ours, b"/reset\n")
        until(ours, "> ")
        os.write(ours, b"anew\n")
        assert "1 of them" in until(ours, "\n> ")
        # Ctrl-D.
        os.write(ours, b"\x04")
        chat.join(PATIENCE)
        assert ends == [0]
    assert "/reset clears the conversation" in capsys.readouterr().err
