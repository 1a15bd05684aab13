"""Tasks by name: those of the package, and those of installed kits."""

import json
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.kits import registry
from kitforge.kits.kit import OwnTaskKit
from kitforge.kits.recommender.build import TASKS as RECOMMENDER
from kitforge.kits.registry import kit_of, recorded_task, task_names
from kitforge.kits.rlhf.build import TASKS as RLHF
from kitforge.kits.transformers.build import TASKS as TRANSFORMERS
from kitforge.preset_files import presets
from kitforge.trainer.options import RunOptions
from tests.trainer.regression import Regression

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_kit"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a module with an entry point `kitforge.kits`, as pip does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site")

    def add(name: str, text: str, target: str = "TASKS") -> None:
        info = tmp_path / "site" / f"{name}-0.1.0.dist-info"
        info.mkdir(parents=True)
        (tmp_path / "site" / f"{name}.py").write_text(text)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[kitforge.kits]\n{name} = {name}:{target}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
        registry._installed_tasks.cache_clear()

    yield add
    registry._installed_tasks.cache_clear()


def test_the_registry_has_the_tasks_of_all_kits() -> None:
    assert {*task_names()} == {*TRANSFORMERS, *RECOMMENDER, *RLHF}
    for tasks in (TRANSFORMERS, RECOMMENDER, RLHF):
        for name, kit in tasks.items():
            assert kit_of(name) is kit
            assert kit.OPTIONS is type(kit.read_options({"task": name}))
    with pytest.raises(ConfigError, match=r"(?s)unknown task 'text_generatoin'.*text_generation"):
        kit_of("text_generatoin")


def test_an_installed_kit_is_trained_by_name(
    install: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]["kitforge.kits"]
    assert points == {"own": "own_kit:TASKS"}
    install("own_kit", (EXAMPLE / "own_kit.py").read_text())
    quick = ["trainer.max_steps=60", "optimizer.learning_rate=0.02", "output_dir=run", "trainer.progress=false"]
    assert cli.run(["train", "task=own", "samples=64", *quick]) == 0
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["eval/loss"] < 0.1 < next(line["loss"] for line in lines if "loss" in line)
    assert recorded_task("run") == "own"
    capsys.readouterr()
    monkeypatch.setattr("kitforge.cli.info.presets", lambda group: {"gpt2_tiny": presets(group)["gpt2_tiny"]})
    for words in (["train", "task=own", "--help"], ["list"], ["config", "task=own"]):
        assert cli.run(words) == 0
    shown = capsys.readouterr().out
    assert "width of the hidden layer" in shown and "tasks without presets of models" in shown
    with pytest.raises(ConfigError, match="has no option 'model'"):
        cli.run(["train", "task=own", "model=llama_tiny"])
    with pytest.raises(ConfigError, match="unknown option 'sample'"):
        cli.run(["train", "task=own", "sample=3"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere_at_all", r"(?s)cannot be imported.*broken = broken:TASKS: ModuleNotFoundError"),
        ("TASKS = {'mine': object()}", r"(?s)has no tasks.*expected: a dict of task names"),
        ("TASKS = ['mine']", r"(?s)has no tasks.*expected: a dict of task names"),
        (
            "from kitforge.kits.transformers.build import TextGeneration as T\nTASKS = {'text_generation': T()}",
            r"(?s)two kits have a task of the same name.*text_generation",
        ),
    ],
)
def test_a_broken_kit_says_which_package_to_mend(install: Any, text: str, words: str) -> None:
    install("broken", text)
    kit_of("sft")  # tasks of the package do not need it
    with pytest.raises(KitforgeError, match=words):
        kit_of("mine")


def test_what_a_task_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    kit, options, cpu = OwnTaskKit(Regression()), RunOptions(), torch.device("cpu")
    calls: dict[str, Callable[[], object]] = {
        "no benchmarks": lambda: kit.evaluate_benchmarks(options, lambda *_: nn.Identity()),
        "does not load models": lambda: kit.load(tmp_path, cpu),
        "keeps no processor": lambda: kit.find_processor(tmp_path),
        "trains no language model": lambda: kit.open_model(tmp_path),
        "exports no models": lambda: kit.save(nn.Identity(), tmp_path, None, None),
        "no torch.export program": lambda: kit.export_program(options),
        "has no pipeline": lambda: kit.open_pipeline(nn.Identity(), None, options),
        "predicts no files": lambda: kit.predict_file(options, lambda *_: nn.Identity()),
        "not served over HTTP": lambda: kit.open_service(nn.Identity(), None, "x", options),
        "keeps no rollouts": lambda: kit.replay(tmp_path, 1, options),
        "describes no data": lambda: kit.describe_data("x"),
        "shows no rows": lambda: kit.inspect_rows(options),
    }
    for words, call in calls.items():
        with pytest.raises(ConfigError, match=f"(?s){words}.*got: +task=custom"):
            call()
