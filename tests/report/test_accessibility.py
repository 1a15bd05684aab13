"""What axe-core asks of the pages, asked of their text: names, landmarks, headings in order, contrast."""

import itertools
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import kitforge.report.page as report_page
from kitforge.inference.server import web_ui
from kitforge.report.index_page import Chapter, write_index
from kitforge.report.page import write_report

_LANDMARKS = {"header": "banner", "main": "main", "aside": "complementary", "form": "form", "nav": "navigation"}
_CONTROLS = {"input", "textarea", "select"}


class _Outline(HTMLParser):
    """The headings, landmarks and controls of a page, and the text and controls outside every landmark."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.levels: list[int] = []
        self.landmarks: Counter[tuple[str, str]] = Counter()
        self.unnamed: list[str] = []
        self.outside: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._labelled = {*re.findall('<label[^>]* for="([^"]*)"', page)}
        self.feed(page.partition("<body>")[2])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        role, name = given.get("role") or _LANDMARKS.get(tag), given.get("aria-label") or ""
        # A form is a landmark only with a name.
        is_landmark = role in {*_LANDMARKS.values(), "region"} and (role != "form" or bool(name))
        if is_landmark:
            self.landmarks[str(role), name] += 1
        if re.fullmatch("h[1-6]", tag):
            self.levels.append(int(tag[1]))
        is_within_label = "label" in [each for each, _ in self._open]
        if tag in _CONTROLS and not (name or is_within_label or given.get("id") in self._labelled):
            self.unnamed.append(tag)
        if tag not in {"input", "br"}:
            self._open.append((tag, is_landmark))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A leaf of a drawing."""

    def handle_data(self, data: str) -> None:
        if data.strip() and not any(is_landmark or tag == "script" for tag, is_landmark in self._open):
            self.outside.append(data)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass


@pytest.fixture
def pages(write_run, tmp_path: Path) -> dict[str, str]:
    folders = [write_run("one", num_steps=60), write_run("two", num_steps=60, seed=2)]
    chapters = [Chapter(folder=each, title=each.name, words="Words.", metric="eval/loss") for each in folders]
    files = {"report": write_report(folders[:1]), "comparison": write_report(folders)}
    files["demo"] = write_index(tmp_path / "index.html", "Three kits", chapters)
    facts: dict[str, Any] = {"context": 64, "most": 64, "sampling": {}}
    chat = {
        f"chat {is_chat}, token {needed}": web_ui.page("model", needs_token=needed, is_chat=is_chat, **facts)
        for is_chat, needed in itertools.product((False, True), repeat=2)
    }
    chat["routes"] = web_ui.docs_page("model", {"/version": {"get": {"summary": "Version"}}})
    return {name: path.read_text("utf-8") for name, path in files.items()} | chat


def test_all_text_is_within_landmarks_of_different_names_and_headings_come_in_order(pages: dict[str, str]) -> None:
    for name, page in pages.items():
        found = _Outline(page)
        assert found.outside == [], name
        assert found.unnamed == [], name
        assert set(found.landmarks.values()) == {1}, (name, found.landmarks)
        assert found.levels[0] == 1 and found.levels.count(1) == 1, name
        pairs = zip(found.levels, found.levels[1:], strict=False)
        assert all(later <= level + 1 for level, later in pairs), (name, found.levels)


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("module", [report_page, web_ui], ids=["report", "chat"])
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_lines_of_3(module, theme: int) -> None:
    style = Path(module.__file__).with_name("page.css").read_text("utf-8")
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[theme]))
    for ground in {"paper", "card", "mark"} & colours.keys():
        for name in colours.keys() - {"paper", "card", "mark", "line"}:
            bound = 3.0 if name.startswith("tone-") else 4.5
            assert contrast(colours[name], colours[ground]) >= bound, (name, ground)
