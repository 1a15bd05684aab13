"""Logging for machines and a console for people; no module of the package calls `print`."""

from __future__ import annotations

import logging

from rich.console import Console

console = Console()
errors = Console(stderr=True)


def logger(name: str) -> logging.Logger:
    """The logger of a module, below the package's own."""
    return logging.getLogger(name)
