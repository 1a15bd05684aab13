"""`kitforge verify --callable`: a right trainer is held, a wrong one is broken, and what is missing is not offered."""

import json
import shutil
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError
from kitforge.verify.own_trainer import CONTRACTS, OwnTrainer
from kitforge.verify.runner import run_contracts
from tests.architecture.source import ROOT
from tests.differential.drawn import WHOLE
from tests.verify.strangers import NEW_RIGHT, NEW_WRONG, RIGHT, WRONG, trainer
from tests.warm.shell import Run

EXAMPLES = ROOT / "examples"
NAMES = ("gradient", "micro_batches", "evaluation", "packing", "resume")
WRONG_ONES = {name: contract for name, (contract, _) in (WRONG | NEW_WRONG).items()}
# Some that nothing found before, and right ones that were called broken, by the contract that called them so.
ALWAYS_WRONG = (*tuple(WRONG)[:15:3], "shifts_twice", "climbs")
ALWAYS_RIGHT = {"saves_by_path": "resume", "loss_is_a_tensor": "evaluation", "loss_is_of_numpy": "evaluation"}


def statuses(
    trainer: str, folder: Path, capsys: pytest.CaptureFixture[str], *further: str
) -> tuple[int, dict[str, str]]:
    arguments = ["verify", "--callable", f"tests.verify.trainers:{trainer}", f"output_dir={folder / 'runs'}", *further]
    status = cli.run(arguments)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["contracts"]
    return status, {each["contract"]: each["status"] for each in found}


def test_a_right_trainer_holds_all_contracts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert statuses("Right", tmp_path, capsys) == (0, dict.fromkeys(NAMES, "held"))


def test_a_wrong_trainer_breaks_all_contracts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert statuses("Wrong", tmp_path, capsys) == (1, dict.fromkeys(NAMES, "broken"))


def test_one_that_hangs_or_says_nonsense_is_broken_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert statuses("Odd", tmp_path, capsys, "--timeout=1") == (1, dict.fromkeys(NAMES, "broken"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "trainer"),
    [("transformers", "verify_hf_trainer:HuggingFaceTrainer"), ("trl", "verify_trl_sft:TrlTrainer")],
)
def test_the_examples_are_trainers(package: str, trainer: str, tmp_path: Path, run: Run) -> None:
    if find_spec(package) is None:
        pytest.skip(f"no {package} here")
    shutil.copy(EXAMPLES / f"{trainer.partition(':')[0]}.py", tmp_path)
    printed = run(["kitforge", "verify", "--callable", trainer, "--only=micro_batches"], tmp_path)
    assert json.loads(printed.splitlines()[-1])["held"] == 1


def test_what_is_missing_is_not_offered_and_never_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert statuses("Few", tmp_path, capsys) == (0, dict.fromkeys(NAMES, "not offered"))


@pytest.mark.parametrize("name", ["nowhere", "tests.verify.trainers:Nobody", "tests.verify.absent:Right"])
def test_one_that_cannot_be_loaded_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trainer"):
        cli.run(["verify", "--callable", name, f"output_dir={tmp_path / 'runs'}"])


def statuses_of(name: str, folder: Path, *contracts: str) -> dict[str, str]:
    # Forks of a process with threads could wait for these for ever.
    torch.set_num_threads(1)
    chosen = [each for each in CONTRACTS if not contracts or each.name in contracts]
    own = OwnTrainer(trainer=trainer(name), folder=folder)
    return {each.contract: each.status for each in run_contracts(chosen, own, name, folder / "log")}


def sample(names: list[str] | tuple[str, ...], always: Collection[str]) -> list[object]:
    """All in `make prove`, those that are named in the gate."""
    return [pytest.param(name, marks=pytest.mark.prove) for name in names if WHOLE or name in always]


@pytest.mark.parametrize("name", sample(tuple(WRONG_ONES), ALWAYS_WRONG))
def test_a_wrong_trainer_breaks_the_contract_that_is_about_it(name: str, tmp_path: Path) -> None:
    contract = WRONG_ONES[name]
    assert statuses_of(name, tmp_path, contract) == {contract: "broken"}


@pytest.mark.parametrize("name", sample([*RIGHT, *NEW_RIGHT], ALWAYS_RIGHT))
def test_a_right_trainer_of_another_kind_is_held(name: str, tmp_path: Path) -> None:
    contracts = [each.name for each in CONTRACTS] if WHOLE else [ALWAYS_RIGHT[name]]
    assert statuses_of(name, tmp_path, *contracts) == dict.fromkeys(contracts, "held")
