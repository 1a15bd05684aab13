"""Hooks of mkdocs (see mkdocs.yml), which fill pages from what they describe and from README."""

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from kitforge.cli.options_help import option_rows
from kitforge.kits.registry import kit_of, task_names

README = Path(__file__).parents[1] / "README.md"
# A line of a page that leads to README's part NAME on a forge, and is that part on the site.
PART = re.compile(r"^.*<!-- README: (\w+) -->$", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\(((?!\w+:)[^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with all options, the parts of README that it asks for, and no links that leave the site."""
    if "<!-- options -->" in markdown:
        markdown = markdown.replace("<!-- options -->", options())
    markdown = PART.sub(lambda found: part(found[1]), markdown)
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: _within_site(link, folder), markdown)


def part(name: str) -> str:
    """What stands in README between `<!-- part: NAME -->` and `<!-- end -->`, with links as seen from docs/."""
    text = README.read_text(encoding="utf-8").partition(f"<!-- part: {name} -->\n")[2].partition("<!-- end -->")[0]
    assert text, f"README has no part {name}"
    return LINK.sub(lambda link: f"[{link[1]}]({posixpath.relpath(link[2], 'docs')}{link[3] or ''})", text)


def _within_site(link: re.Match[str], folder: str) -> str:
    """A link, or the name of a file of the repository that is no page."""
    path = posixpath.normpath(posixpath.join(folder, link[2]))
    name = "" if link[1] == posixpath.basename(path) else f"{link[1]}, "
    return f"{name}`{path[3:]}`" if path.startswith("../") else link[0]


def options() -> str:
    """A section for each task: its options, or how their defaults differ from those of a task with the same options."""
    first: dict[type[Any], str] = {}
    lines: dict[str, list[str]] = {}
    sections = []
    for task in task_names():
        like = first.setdefault(kit_of(task).OPTIONS, task)
        lines[task] = [_row(*found) for found in option_rows(task)]
        shown = [row for row in lines[task] if like == task or row not in lines[like]]
        note = f"As [{like}](#{like}), with these defaults:\n\n" if like != task else ""
        table = "\n".join(["| option | default | meaning |", "|---|---|---|", *shown])
        sections.append(f"## {task}\n\n{note}{table}\n")
    return "\n".join(sections)


def _row(option: str, default: str, words: str) -> str:
    cells = (f"`{option}`", f"`{default}`" if default else "", html.escape(words, quote=False))
    return f"| {' | '.join(cells)} |"
