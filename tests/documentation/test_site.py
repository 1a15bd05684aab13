"""The site of `make docs` and the workflows of the forge."""

import re
from pathlib import Path

import pytest
import yaml

from kitforge.foundation.config import option_names
from kitforge.kits.registry import kit_of, task_names
from tests.warm.shell import Run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_page_and_every_docstring_of_the_reference_is_built(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    run(["python", "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)], ROOT)
    assert "Trainer.train" in (tmp_path / "api" / "entry" / "index.html").read_text(encoding="utf-8")
    options = (tmp_path / "api" / "options" / "index.html").read_text(encoding="utf-8")
    sections = dict(re.findall(r'<h2 id="(\w+)">(.*?)(?=<h2|$)', options, re.DOTALL))
    assert list(sections) == task_names()
    for task, section in sections.items():
        like = re.search(r'As <a href="#(\w+)"', section)
        shown = re.findall(r"<tr>\s*<td><code>([\w.]+)</code>", section + (sections[like[1]] if like else ""))
        missing = [name for name in option_names(kit_of(task).OPTIONS) if f" {name}" not in " ".join(["", *shown])]
        assert missing == [], task


def test_every_page_is_in_the_navigation() -> None:
    # The hooks and the emoji of mkdocs.yml need no constructor of mkdocs's own.
    pages = re.findall(r"[\w/]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    found = [str(path.relative_to(ROOT / "docs").as_posix()) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages) == sorted(found)


def test_workflows_run_the_gate() -> None:
    workflows = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    steps = [step.get("run") for each in workflows for job in each["jobs"].values() for step in job["steps"]]
    assert steps.count(".ci/run") == len(workflows) == 2
    assert "make lint" in (ROOT / ".ci" / "run").read_text()
