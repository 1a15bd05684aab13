"""The demo trains every part, one from the other, and ends on a page that leads to all reports."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kitforge.cli import demo
from kitforge.cli import main as cli
from kitforge.cli.demo import PARTS
from kitforge.foundation.errors import ConfigError
from tests.differential.drawn import WHOLE

# In the gate every part takes steps, and the first two are short and sure enough to better their figure already;
# `make prove` trains as long as the reader does.
STEPS = {} if WHOLE else {"text": 4, "clicks": 25, "demonstrations": 2, "preferences": 2, "rewards": 2}
# By how much at least, in the figure of each part.
BETTERS = {"text": -0.3, "clicks": 0.15}
if WHOLE:
    BETTERS = {"text": -3.0, "clicks": 0.2, "demonstrations": -2.0, "preferences": 0.2, "rewards": 0.5}


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


def test_the_demo_writes_into_no_folder_that_is_there(tmp_path: Path) -> None:
    for arguments, words in (([str(tmp_path)], "which exists"), (["seed=1"], "takes no options")):
        with pytest.raises(ConfigError, match=words):
            cli.run(["demo", *arguments])


@pytest.mark.prove
def test_the_demo_betters_every_part_and_ends_on_one_page_that_leads_to_every_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {name: {"trainer.max_steps": steps, "trainer.eval_every": steps} for name, steps in STEPS.items()}
    parts = [replace(part, options={**part.options, **short.get(part.name, {})}) for part in PARTS]
    monkeypatch.setattr(demo, "PARTS", parts)
    monkeypatch.chdir(tmp_path)
    assert cli.run(["demo", "tour"]) == 0
    page = check_page(Path("tour"))
    figures = [float(each) for each in re.findall(r"(?:before|after)</dt><dd><b>(-?[\d.]+)</b>", page)]
    changes = {
        part.name: after - before for part, before, after in zip(PARTS, figures[::2], figures[1::2], strict=True)
    }
    for name, least in BETTERS.items():
        assert changes[name] / least > 1, f"{name} changed by {changes[name]}"
    # Texts and answers stand side by side, before and after.
    ends = [parts[0].options["trainer.max_steps"], parts[-1].options["trainer.max_steps"]]
    assert re.findall('<div class="pairs"><h3>Step 0</h3><h3>Step (.*?)</h3>', page) == [str(end) for end in ends]
    shown = capsys.readouterr().out
    for words in ("5 of 5", "Results", "open tour/index.html", "kitforge generate checkpoint=tour/text"):
        assert words in shown
