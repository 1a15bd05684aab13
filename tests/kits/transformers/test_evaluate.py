"""A trained language model is evaluated as its run evaluated it: by the run's own options."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kitforge.cli.main import run
from kitforge.foundation.errors import KitforgeError
from tests.trainer import tiny

NETWORK = [f"model.{name}={value}" for name, value in tiny.LLAMA.items() if name != "family"] + ["model.num_kv_heads=2"]
# Each changes what is evaluated, or how.
OWN = ["data.sequence_length=24", "data.column=words", "data.eval_fraction=0.3", "seed=5", "trainer.eval_batches=2"]
OWN += ["data.batch_size=3"]
SHORT = ["trainer.max_steps=2", "trainer.progress=false", "device=cpu", "optimizer.learning_rate=0.01"]

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two texts and a run over each."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, width in (("rows", 40), ("others", 30)):
        lines = (json.dumps({"words": f"{name} {number} " * (width + number % 7)}) for number in range(20))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    rows = f"data.train={folder}/rows.jsonl"
    assert run(["train", *NETWORK, *OWN, *SHORT, rows, f"output_dir={folder}/first"]) == 0
    given = [rows, f"data.eval={folder}/rows.jsonl", f"output_dir={folder}/second"]
    assert run(["train", *NETWORK, *OWN, *SHORT, *given]) == 0
    return folder


@pytest.fixture(autouse=True)
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)


def recorded(name: str) -> dict[str, float]:
    """The last evaluation that a run wrote down."""
    line = tiny.records(Path(name), "eval")[-1]
    return {name.removeprefix("eval/"): value for name, value in line.items() if name.startswith("eval/")}


def evaluated(capsys: Capture, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["evaluate", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_figures_are_those_of_the_run(capsys: Capture, name: str) -> None:
    assert evaluated(capsys, f"checkpoint={name}") == pytest.approx(recorded(name), rel=1e-5)
    assert evaluated(capsys, f"checkpoint={name}/checkpoints/step_2") == pytest.approx(recorded(name), rel=1e-5)
    # What is typed comes first.
    assert evaluated(capsys, f"checkpoint={name}", "data.sequence_length=12") != pytest.approx(recorded(name), rel=1e-5)


def test_another_file_is_cut_as_the_run_cut_its_own(capsys: Capture, trained: Path) -> None:
    asked = ["checkpoint=first", "data.eval=others.jsonl"]
    found = evaluated(capsys, *asked)
    assert found == evaluated(capsys, *asked, *OWN)
    # The text that was trained on is not needed.
    text = trained / "rows.jsonl"
    text.rename(trained / "gone.jsonl")
    try:
        assert evaluated(capsys, *asked) == found
        with pytest.raises(KitforgeError, match=r"rows\.jsonl"):
            run(["evaluate", "checkpoint=first"])
    finally:
        (trained / "gone.jsonl").rename(text)


def test_another_text_to_part_is_not_passed_over_for_the_one_of_the_run(capsys: Capture) -> None:
    asked = ["checkpoint=second", "data.train=others.jsonl"]
    other = evaluated(capsys, *asked)
    assert other == evaluated(capsys, *asked, "data.eval=null")
    assert other != pytest.approx(recorded("second"), rel=1e-5)
