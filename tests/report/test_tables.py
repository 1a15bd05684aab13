"""The panel about tables is drawn from whatever of the file can be read."""

import json
from pathlib import Path

from kitforge.report.metrics import read_run
from kitforge.report.tables import TABLES_FILE, tables

COUNTS = {"hits": {"device": 90, "host": 8, "file": 0, "new": 2}, "moved": {"device": 10, "host": 7}}


def write_run(folder: Path, lines: list[str]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("task: recommendation\n")
    (folder / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 0.5}) + "\n")
    (folder / TABLES_FILE).write_text("\n".join(lines))
    return folder


def line(step: int, name: str = "deep_16", counts: dict[str, dict[str, int]] = COUNTS) -> str:
    return json.dumps({"kind": "tables", "step": step, "tables": {name: counts}})


def test_hits_moves_and_the_curve_are_drawn(tmp_path: Path) -> None:
    curve = json.dumps({"kind": "curve", "table": "deep_16", "points": [[10, 0.2], [100, 0.9]]})
    later = line(2, counts={"hits": {"device": 3, "new": 1}, "moved": {"device": 4}})
    panel = tables([read_run(write_run(tmp_path / "run", [curve, line(1), later]))], ["run"])
    assert panel is not None
    for words in ("lookups by tier", "rows written", "hit rate by device tier size", "host", "new"):
        assert words in panel.html
    assert panel.html.count('class="x" aria-hidden="true" data-axis="step"') == 2
    assert 'data-axis="rows"' in panel.html and "[[10,0.2],[100,0.9]]" in panel.html
    assert ">file<" not in panel.html
    # A tier that a line does not name was neither asked nor written.
    for points in ("[[1,0.08],[2,0.0]]", "[[1,0.02],[2,0.25]]", "[[1,7.0],[2,0.0]]"):
        assert points in panel.html


def test_several_runs_stand_under_their_names(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / name, [line(1)])) for name in ("one", "other")]
    panel = tables(runs, ["one", "<other>"])
    assert panel is not None
    assert "<h3>one</h3>" in panel.html and "<h3>&lt;other&gt;</h3>" in panel.html


def test_names_of_tables_are_escaped(tmp_path: Path) -> None:
    panel = tables([read_run(write_run(tmp_path / "run", [line(1, "<script>")]))], ["run"])
    assert panel is not None
    assert "<script>" not in panel.html


def test_a_torn_line_is_passed_over_and_no_file_gives_no_panel(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [line(1), '{"kind": "tab'])
    assert tables([read_run(run)], ["run"]) is not None
    (run / TABLES_FILE).unlink()
    assert tables([read_run(run)], ["run"]) is None
