"""Logging for machines and a console for people; no module of the package calls `print`.

Whatever reaches a person through here is text: names, messages and files of strangers cannot move the cursor, set a
title or clear the screen.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import final

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment


def sanitize(text: str) -> str:
    """The text with U+FFFD for every letter that a terminal could obey: escapes, control codes of either set,
    overrides of direction."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


@final
@dataclass(frozen=True, slots=True)
class _Sanitized:
    """Something to be printed, its text sanitized once it is laid out; colours and movements of rich itself stay."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(sanitize(segment.text), segment.style)


@final
class _Sanitizer(RenderHook):
    """What a console asks before it prints."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Sanitized(renderable) for renderable in renderables]


@final
class _SanitizingFormatter(logging.Formatter):
    """Python's own format of a record, sanitized."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))


def sanitizing_console(console: Console) -> Console:
    """The console, which from now on sanitizes what it prints."""
    console.push_render_hook(_Sanitizer())
    return console


console = sanitizing_console(Console())
errors = sanitizing_console(Console(stderr=True))


def logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's own."""
    return logging.getLogger(name)


def log_to_terminal() -> None:
    """Let the warnings of a command line, of any package, reach standard error sanitized."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_SanitizingFormatter())
