"""The completions panel: the first completions of a run's latest rollout batches, with their rewards.

It reads rollouts/round_N.jsonl. Each line holds `prompt`, `completion` and `reward`; `reward_shaped`, `rewards` by name
and `advantage` are optional.
"""

from collections.abc import Sequence
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any

from kitforge.foundation.untrusted import parse_json
from kitforge.report.metrics import RunRecord
from kitforge.report.number_format import number
from kitforge.report.panels import Panel, html_table

ROLLOUTS = "rollouts"
# Above these the page says where more lies.
_MOST_ROUNDS, _MOST_ROWS, _MOST_CHARACTERS = 3, 8, 1000


def completions(runs: Sequence[RunRecord], labels: Sequence[str]) -> Panel | None:
    """The panel of the runs that kept rollout files; None if no run did."""
    parts = [
        (f"<h3>{escape(label)}</h3>" if len(runs) > 1 else "") + "".join(map(_round, files))
        for run, label in zip(runs, labels, strict=True)
        if (files := _latest(run.folder / ROLLOUTS))
    ]
    return Panel("Completions", "".join(parts)) if parts else None


def _latest(folder: Path) -> list[Path]:
    """The latest rollout files, the newest first."""
    numbers = {path: path.stem.removeprefix("round_") for path in folder.glob("round_*.jsonl")}
    found = [path for path, text in numbers.items() if text.isdecimal()]
    return sorted(found, key=lambda path: int(numbers[path]), reverse=True)[:_MOST_ROUNDS]


def _round(path: Path) -> str:
    rows = _read(path)
    names = list(dict.fromkeys(name for row in rows for name in figures_of(row)))
    cells = [
        (
            _text(row.get("prompt")),
            [
                _text(row.get("completion")),
                *(
                    number(float(value)) if isinstance(value := figures_of(row).get(name), (int, float)) else ""
                    for name in names
                ),
            ],
        )
        for row in rows
    ]
    note = f'<p class="note">The first {len(rows)} completions. All: {ROLLOUTS}/{escape(path.name)}</p>'
    shown = html_table("Prompt", ["Completion", *map(escape, names)], cells)
    return (
        f"<details><summary>Rollout batch {escape(path.stem.removeprefix('round_'))}</summary>{shown}{note}</details>"
    )


def figures_of(row: dict[str, Any]) -> dict[str, Any]:
    """The reward, each of several rewards and the advantage of a completion, by name."""
    named = row.get("rewards")
    own = {f"rewards/{name}": value for name, value in named.items()} if isinstance(named, dict) else {}
    outer = {name: row[name] for name in ("reward", "reward_shaped", "advantage") if name in row}
    return {name: outer.pop(name) for name in ("reward", "reward_shaped") if name in outer} | own | outer


def _read(path: Path) -> list[dict[str, Any]]:
    """The first lines; a torn last line of a killed run is left out."""
    rows: list[dict[str, Any]] = []
    try:
        with open(path, "rb") as lines:
            for line in islice(lines, _MOST_ROWS):
                row = parse_json(line)
                rows += [row] if isinstance(row, dict) else []
    except (OSError, ValueError):
        pass
    return rows


def _text(value: object) -> str:
    text = str(value)
    left = len(text) - _MOST_CHARACTERS
    return escape(text[:_MOST_CHARACTERS]) + (f" <em>({left:,} more characters)</em>" if left > 0 else "")
