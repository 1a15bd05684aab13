"""Hooks of mkdocs (see mkdocs.yml): a comment `<!-- help: TASK -->` becomes the help of that task."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

from kitforge.cli.main import run


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with the help texts in it."""
    return re.sub(r"<!-- help: (\w+) -->", _help, markdown)


def _help(found: re.Match[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        run(["train", f"task={found[1]}", "--help"])
    return f"```text\n{text.getvalue().rstrip()}\n```"
