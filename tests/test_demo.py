"""The demo trains every part, one from the other, and ends on a page that leads to all reports."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kitforge.cli import main as cli
from kitforge.cli.demo import PARTS, run_demo
from kitforge.foundation.errors import ConfigError

# The same parts with next to nothing to do in each.
SHORT = {"trainer.max_steps": 2, "trainer.eval_every": None, "trainer.eval_batches": 1}
QUIET = {"trainer.progress": False, "device": "cpu"}


class Links(HTMLParser):
    """The targets of a page's links."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [str(value) for name, value in attrs if tag == "a" and name == "href"]


def check_page(folder: Path) -> str:
    """Every part has its chapter, its numbers before and after, and a link that leads somewhere."""
    page = (folder / "index.html").read_text()
    assert re.findall("<h2>(.*?)</h2>", page) == [part.title for part in PARTS]
    links = Links(page).found
    assert links == [f"{part.name}/report.html" for part in PARTS]
    assert all((folder / link).is_file() for link in links)
    assert page.count(" before</dt>") == page.count(" after</dt>") == len(PARTS)
    return page


@pytest.mark.slow
def test_the_demo_ends_on_one_page_that_leads_to_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_demo(Path("tour"), SHORT | QUIET) == 0
    page = check_page(Path("tour"))
    # Texts and answers stand side by side, before and after.
    assert page.count('<div class="pairs"><h3>Step 0</h3><h3>Step 2</h3>') == 2
    shown = capsys.readouterr().out
    for words in ("5 of 5", "Results", "open tour/index.html", "kitforge generate checkpoint=tour/text"):
        assert words in shown


def test_the_demo_writes_into_no_folder_that_is_there(tmp_path: Path) -> None:
    for arguments, words in (([str(tmp_path)], "which exists"), (["seed=1"], "takes no options")):
        with pytest.raises(ConfigError, match=words):
            cli.run(["demo", *arguments])


@pytest.mark.prove
def test_the_whole_demo_betters_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo", "tour"]) == 0
    page = check_page(Path("tour"))
    figures = [float(each) for each in re.findall(r"(?:before|after)</dt><dd><b>(-?[\d.]+)</b>", page)]
    changes = {
        part.name: after - before for part, before, after in zip(PARTS, figures[::2], figures[1::2], strict=True)
    }
    assert changes["text"] < -3
    assert changes["clicks"] > 0.2
    assert changes["demonstrations"] < -2
    assert changes["preferences"] > 0.2
    assert changes["rewards"] > 0.5
