"""What `trainer.foresee` says before a run and in its report; a run without it is the same, and loads no planner."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.api import Trainer
from kitforge.foresight import named_cluster
from kitforge.foundation.config import to_yaml
from kitforge.foundation.errors import ConfigError
from kitforge.report.foreseen import FORESEEN, foreseen
from kitforge.report.metrics import read_run
from kitforge.verify.sample_data import write_sample
from tests.small_run import OPTIONS, WITHOUT_MODEL

SPEED = {"peak_tflops": {"fp32": 0.1}, "memory_gb_per_s": 10.0, "launch_us": 5.0, "is_asynchronous": False}
TASKS = {
    "text_generation": OPTIONS,
    "dpo": {name: value for name, value in OPTIONS.items() if "inference" not in name} | {"data.sequence_length": 128},
    "recommendation": {
        **{name: value for name, value in WITHOUT_MODEL.items() if "sequence" not in name and "inference" not in name},
        "model": "dlrm",
    },
}


def trained(task: str, folder: Path, **changes: Any) -> Path:
    model = {} if "model" in TASKS[task] else {"model": "llama_tiny"}
    rows = str(write_sample(task, folder))
    options = {**TASKS[task], **model, "data.train": rows, **changes}
    trainer = Trainer(task, options.pop("model"), output_dir=folder / "run", options=options)
    return trainer.train().folder


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_the_report_has_what_was_foreseen_beside_what_was_measured(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "cluster").mkdir(parents=True)
    (tmp_path / "configs" / "cluster" / "here.yaml").write_text(to_yaml({"kind": "cpu", "speed": SPEED}))
    folder = trained(task, tmp_path, **{"trainer.foresee": True})
    figures = json.loads((folder / FORESEEN).read_text())
    assert figures["peak_bytes"] > 0 and figures["step_seconds"] > 0
    said = capsys.readouterr().out
    assert "foreseen: " in said and "ms a step (here)" in said
    panel = foreseen([read_run(folder)], ["run"])
    assert panel is not None and panel.html.count("\N{EM DASH}") == 2  # a CPU measures no bytes of tensors
    assert panel.html in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_is_foreseen_trains_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for number, asked in enumerate((False, True)):
        (folder := tmp_path / str(number)).mkdir()
        found.append(trained("text_generation", folder, **{"trainer.foresee": asked}))
    plain, planned = (sorted((each / "checkpoints").rglob("*.safetensors")) for each in found)
    assert plain and [each.read_bytes() for each in plain] == [each.read_bytes() for each in planned]
    assert "no time of a step: `kitforge plan calibrate`" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_run_that_is_not_asked_loads_no_planner(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.small_run import write_run; "
        f"write_run(pathlib.Path({str(tmp_path)!r})); "
        "planners = 'kitforge.foresight', 'kitforge.kits.planning', 'kitforge.kits.auto_layout', 'kitforge.cli.auto'; "
        "print([name for name in planners if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert not (tmp_path / "runs" / "bard" / FORESEEN).exists()


def test_what_cannot_be_planned_is_said_and_trains_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kitforge import foresight
    from kitforge.kits.kit import RunInputs
    from kitforge.kits.registry import kit_of

    kit = kit_of("text_generation")
    options = Trainer("text_generation", "llama_tiny", options={**OPTIONS, "trainer.foresee": True}).options

    def refuse(*_: Any) -> None:
        raise ConfigError("no plan of this", fix="none")

    monkeypatch.setattr(foresight, "plan_memory", refuse)
    inputs = RunInputs[object]()
    assert foresight.foreseeing(kit, options, inputs) is inputs
    assert "not foreseen: no plan of this" in capsys.readouterr().out


def test_an_unknown_cluster_and_one_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="h100"):
        named_cluster("h1000")
    # No other begins so.
    assert named_cluster("v100") == named_cluster("v100_32g")
    options = {**OPTIONS, "trainer.foresee": "h100"}
    with pytest.raises(ConfigError, match=r"trainer\.foresee[\s\S]*kind cpu"):
        Trainer("text_generation", "llama_tiny", ["a"], options=options).train()


def run_with(folder: Path, figures: Any, steps: list[tuple[float, float]]) -> Path:
    lines = [
        {"kind": "train", "step": number, "loss": 1.0, "time/step_seconds": seconds, "time/memory_bytes": size}
        for number, (seconds, size) in enumerate(steps, 1)
    ]
    (folder / "config.yaml").write_text("task: custom\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / FORESEEN).write_text(figures if isinstance(figures, str) else json.dumps(figures))
    return folder


SECONDS, BYTES = st.floats(1e-4, 1e3), st.integers(2**20, 2**40)


@given(SECONDS, BYTES, st.lists(st.tuples(SECONDS, BYTES), min_size=1, max_size=5))
def test_of_a_gpu_the_ratios_are_to_the_peak_and_to_the_median_step(
    tmp_path_factory: pytest.TempPathFactory, seconds: float, size: int, steps: list[tuple[float, float]]
) -> None:
    figures = {"device": "cuda", "peak_bytes": size, "step_seconds": seconds, "doubts": ["<a doubt>"]}
    run = read_run(run_with(tmp_path_factory.mktemp("run"), figures, steps))
    panel = foreseen([run], ["run"])
    ordered = sorted(each for each, _ in steps)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    assert panel is not None
    assert f"<td>{size / max(each for _, each in steps):.2f}</td>" in panel.html
    assert f"<td>{seconds / middle:.2f}</td>" in panel.html
    assert "&lt;a doubt&gt;" in panel.html


@pytest.mark.parametrize("text", ["[]", "{", '{"device": "cpu"}', '{"peak_bytes": "many", "step_seconds": null}'])
def test_a_file_of_another_shape_is_no_panel(text: str, tmp_path: Path) -> None:
    assert foreseen([read_run(run_with(tmp_path, text, [(1.0, 1.0)]))], ["run"]) is None
