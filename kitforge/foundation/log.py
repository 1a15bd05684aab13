"""Loggers and sanitized consoles; no module of the package calls `print`.

Output is plain text: names, messages and file contents cannot send control codes to the terminal.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook, RenderResult
from rich.segment import Segment

_PACKAGE = "kitforge"
_MOST_NOTES = 100
_warned: set[str] = set()


def sanitize(text: str) -> str:
    """The text with U+FFFD in place of escapes, control codes and overrides of text direction."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in text)


@dataclass(frozen=True, slots=True)
class _Sanitized:
    """A renderable whose text is sanitized after layout; the control codes of rich itself stay."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self.content, options):
            yield segment if segment.control else Segment(sanitize(segment.text), segment.style)


class _Sanitizer(RenderHook):
    """The render hook of a sanitizing console."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Sanitized(renderable) for renderable in renderables]


class _SanitizingFormatter(logging.Formatter):
    """The default log format, sanitized."""

    def format(self, record: logging.LogRecord) -> str:
        return sanitize(super().format(record))


def sanitizing_console(console: Console) -> Console:
    """Make `console` sanitize its output, and return it."""
    console.push_render_hook(_Sanitizer())
    return console


console = sanitizing_console(Console())
errors = sanitizing_console(Console(stderr=True))


def say(text: str) -> None:
    """Print plain text: no colours, no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's own."""
    return logging.getLogger(name)


class _Notes(logging.Handler):
    """Keeps the warnings of the package, each once and in one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a warning, and show it as logging does without this handler: on standard error where no other is set."""
        self.keep(record)
        handlers = [*logger(_PACKAGE).handlers, *logging.root.handlers]
        notes = [each for each in handlers if isinstance(each, _Notes)]
        if handlers == notes and notes[-1] is self and logging.lastResort is not None:
            logging.lastResort.handle(record)

    def keep(self, record: logging.LogRecord) -> None:
        """Keep a warning that has been shown."""
        text = " ".join(sanitize(record.getMessage()).split())
        if text not in self.texts and len(self.texts) < _MOST_NOTES:
            self.texts.append(text)


@contextmanager
def noting_warnings() -> Iterator[list[str]]:
    """The warnings that are logged meanwhile, those of `warn_once` also if an earlier run was told."""
    notes, package = _Notes(), logger(_PACKAGE)
    package.addHandler(notes)
    try:
        yield notes.texts
    finally:
        package.removeHandler(notes)


def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning that a process needs to see once."""
    if message not in _warned:
        _warned.add(message)
        log.warning("%s", message)
        return
    record = log.makeRecord(log.name, logging.WARNING, "", 0, message, (), None)
    for handler in logger(_PACKAGE).handlers:
        if isinstance(handler, _Notes):
            handler.keep(record)


def log_to_terminal() -> None:
    """Sanitize warnings of all packages that reach standard error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_SanitizingFormatter())
