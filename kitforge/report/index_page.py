"""An index page of several runs: a link to each report, and a metric before and after training."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from kitforge.foundation.files import write_text
from kitforge.report.metrics import RunRecord, read_run
from kitforge.report.number_format import duration, number
from kitforge.report.page import document
from kitforge.report.samples import side_by_side
from kitforge.report.summary import num_steps, seconds, title


@dataclass(frozen=True, slots=True, kw_only=True)
class Chapter:
    """A run with its title, a sentence about it, and the evaluation metric to show."""

    folder: Path
    title: str
    words: str
    metric: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A metric before the first step and after the last, and the training time."""

    metric: str
    before: float
    after: float
    seconds: float


def outcome(run: RunRecord, metric: str) -> Outcome:
    """The change of a metric that the run evaluated at least once."""
    values = run.eval[metric].values
    return Outcome(metric=metric.removeprefix("eval/"), before=values[0], after=values[-1], seconds=seconds(run))


def write_index(target: Path, heading: str, chapters: Sequence[Chapter]) -> Path:
    """Write the page to `target` and return that path. Raises DataError for a folder that holds no run."""
    body = "".join(_chapter(chapter, read_run(chapter.folder), target.parent) for chapter in chapters)
    write_text(target, document(heading, "Kitforge", body))
    return target


def _chapter(chapter: Chapter, run: RunRecord, start: Path) -> str:
    found = outcome(run, chapter.metric)
    tiles = (
        (f"{title(found.metric)} before", number(found.before)),
        (f"{title(found.metric)} after", number(found.after)),
        ("Steps", f"{num_steps(run):,}"),
        ("Time", duration(found.seconds)),
    )
    items = "".join(f"<div><dt>{escape(name)}</dt><dd><b>{escape(text)}</b></dd></div>" for name, text in tiles)
    link = escape(Path(os.path.relpath(chapter.folder / "report.html", start)).as_posix())
    return (
        f'<section><h2>{escape(chapter.title)}</h2><p>{escape(chapter.words)} <a href="{link}">The whole report</a></p>'
        f'<dl class="tiles">{items}</dl>{side_by_side(run.samples)}</section>\n'
    )
