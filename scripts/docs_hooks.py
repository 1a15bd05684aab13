"""Hooks of mkdocs (see mkdocs.yml): a comment `<!-- help: TASK -->` becomes the help of that task."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with the help texts in it."""
    return re.sub(r"<!-- help: (\w+) -->", _help, markdown)


def _help(found: re.Match[str]) -> str:
    command = [sys.executable, "-m", "kitforge", "train", f"task={found[1]}", "--help"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return f"```text\n{text.rstrip()}\n```"
