"""The contracts panel: every verdict of verify.json, escaped; none where the file is absent or of another shape."""

import json
from pathlib import Path

import pytest

from kitforge.report.contracts import contracts
from kitforge.report.metrics import read_run
from kitforge.report.page import write_report
from kitforge.verify.contract import Verdict
from kitforge.verify.runner import write_verdicts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("task: custom\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, "loss": 2.0}) + "\n")
    return tmp_path


def test_every_verdict_has_a_row(folder: Path) -> None:
    held = Verdict(
        contract="packing", subject="x", status="held", figure=3e-16, bound=1e-9, words="relative", seconds=2
    )
    broken = Verdict(contract="resume", subject="x", status="broken", words="ValueError: <no way>")
    write_verdicts(folder, [held, broken])
    page = write_report([folder]).read_text(encoding="utf-8")
    assert "Contracts" in page
    assert "relative" in page and "packing" in page
    assert "<b>broken</b>" in page and "&lt;no way&gt;" in page


@pytest.mark.parametrize("text", ["[]", "{", '{"contracts": 1}', '{"contracts": [1, "two"]}'])
def test_a_file_of_another_shape_is_no_panel(folder: Path, text: str) -> None:
    (folder / "verify.json").write_text(text)
    assert contracts([read_run(folder)], ["run"]) is None


def test_a_run_without_the_file_has_no_panel(folder: Path) -> None:
    assert contracts([read_run(folder)], ["run"]) is None
