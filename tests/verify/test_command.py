"""`kitforge verify` on a configuration: what is refused, what is reduced, and what it leaves behind."""

import json
import os
from pathlib import Path

import pytest

from kitforge.cli import main as cli
from kitforge.foundation.errors import KitforgeError
from kitforge.verify.case import Case
from kitforge.verify.catalog import CONTRACTS
from tests.verify.planted import TEXT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_contracts_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", "--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [each.name for each in CONTRACTS]


def test_lines_then_json_then_a_report_with_a_panel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["verify", *TEXT, "--only", "packing,cache", "output_dir=checked"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[1] for line in lines if line.startswith(("  held", "  not"))] == ["held", "not offered"]
    found = json.loads(last)
    assert (found["held"], found["broken"], found["not offered"]) == (1, 0, 1)
    assert [each["contract"] for each in found["contracts"]] == ["packing", "cache"]
    assert "Contracts" in (tmp_path / "checked" / "0" / "base" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "options",
    [
        ["model=llama_tiny", "data.train=nowhere.txt"],
        ["model=llama_tiny", "optimizer.learning_rat=1"],
        ["model=llama_tiny", "data.train=here.txt", "parallel.tensor=3"],
        ["task=sft", "model=llama_tiny", "trainer.max_steps=0"],
    ],
)
def test_what_train_refuses_is_refused_with_the_same_words(options: list[str]) -> None:
    Path("here.txt").write_text("a text of some words. " * 200)
    words = []
    for verb in (["train"], ["verify", "--only=damage"]):
        with pytest.raises(KitforgeError) as caught:
            cli.run([*verb, *options])
        words.append(str(caught.value))
    assert words[0] == words[1]


@pytest.mark.parametrize(
    "arguments", [["--onl=packing"], ["--only"], ["--only=pack"], ["--timeout=no"], ["--callable=a:b", "seed=1"]]
)
def test_arguments_that_cannot_be_are_refused(arguments: list[str]) -> None:
    with pytest.raises(KitforgeError):
        cli.run(["verify", *arguments])
    assert os.listdir() == []


def test_a_large_configuration_is_reduced_and_says_so(tmp_path: Path) -> None:
    choices = {"model": "llama_7b", "data.batch_size": 64, "data.sequence_length": 2048, "parallel.tensor": 2}
    case = Case.of({"task": "text_generation", **choices}, tmp_path / "case")
    said = dict(each.split("=") for each in case.reduced if "=" in each)
    assert said["model.num_layers"] == "2" and said["data.batch_size"] == "6" and said["data.sequence_length"] == "64"
    options = case.options({})
    assert (options.model["num_layers"], options.parallel.world_size, case.num_ranks) == (2, 1, 2)


def test_degrees_of_any_task_are_kept_for_ranks_alone(tmp_path: Path) -> None:
    case = Case.of({"task": "recommendation", "parallel.data": 2}, tmp_path / "case")
    assert (case.options({}).parallel.world_size, case.num_ranks) == (1, 2)
    assert "one rank but for ranks and layouts" in case.reduced
