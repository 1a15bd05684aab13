"""The command line on several ranks: it starts them, torchrun starts them, one dies, and the losses stay the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kitforge.cli import main as cli
from kitforge.foundation.errors import ConfigError
from kitforge.verify.processes import free_port, launched, run_ranks
from tests.distributed.training import BASE, LLAMA, write_text
from tests.patience import PATIENCE
from tests.warm.shell import ROOT, Run

pytestmark = pytest.mark.slow
ARGUMENTS = [f"{name}={json.dumps(value)}" for name, value in {**LLAMA, **BASE, "trainer.progress": True}.items()]


def command(folder: Path, run: str, *further: str) -> list[str]:
    arguments = [*ARGUMENTS, f"data.train={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
    return [*arguments, f"output_dir={folder / run}", *further]


def start_command(folder: Path, shims: Path, *arguments: str) -> subprocess.Popen[str]:
    """It and its ranks have imported torch; its output is dropped."""
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([str(shims / "kitforge"), *arguments], cwd=folder, env=environment, **pipes)


def on_forked_ranks(folder: Path, size: int, *arguments: str) -> str:
    """The same on ranks that find the environment of a launcher and are forked from here, which saves the start of
    Python and torch where that is not the point; what the first of them prints."""
    run_ranks(size, launched, size, free_port(), _run_command, folder, arguments, timeout=3 * PATIENCE)
    return (folder / "printed-0").read_text()


def _run_command(folder: Path, arguments: tuple[str, ...]) -> None:
    os.chdir(folder)
    with (folder / f"printed-{os.environ['RANK']}").open("w") as sys.stdout:
        assert cli.run(arguments) == 0


def losses(folder: Path, run: str) -> list[float]:
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("command")
    write_text(place)
    return place


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    """The losses of one process."""
    assert cli.run(["train", *command(folder, "alone")]) == 0
    return losses(folder, "alone")


def test_ranks_that_find_a_layout_train_as_those_that_are_given_it(folder: Path) -> None:
    fixed = (
        "trainer.micro_batch_size=1",
        "trainer.activation_checkpointing=none",
        "parallel.data=1",
        "parallel.context=1",
    )
    said = on_forked_ranks(folder, 2, "train", *command(folder, "auto", "parallel=auto", *fixed))
    layout = re.findall(r"parallel=auto: (.*?); found in", " ".join(said.split()))[0].split()
    assert layout and all(re.match(r"parallel\.\w+=\w+$", each) for each in layout)
    on_forked_ranks(folder, 2, "train", *command(folder, "given", *fixed, *layout))
    auto, given = (sorted((folder / each / "checkpoints").rglob("model*")) for each in ("auto", "given"))
    assert auto and [each.read_bytes() for each in auto] == [each.read_bytes() for each in given]


def test_it_starts_its_own_ranks_and_one_of_them_speaks(
    folder: Path, alone: list[float], run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    told = run(["kitforge", "train", *command(folder, "two", "parallel.tensor=2")], folder)
    assert losses(folder, "two") == pytest.approx(alone, abs=2e-6)
    assert told.count("step 4/4") == 1
    assert told.count("try next") == 1
    evaluation = [
        "evaluate",
        f"checkpoint={folder / 'two'}",
        f"data.eval={folder / 'text.txt'}",
        "device=cpu",
        "data.sequence_length=16",
        f"data.cache={folder / 'cache'}",
    ]
    capsys.readouterr()
    assert cli.run(evaluation) == 0
    printed = [
        capsys.readouterr().out,
        run(["kitforge", *evaluation, "parallel.data=2"], folder),
        on_forked_ranks(folder, 2, *evaluation, "parallel.tensor=2"),
    ]
    found = [json.loads(each.splitlines()[-1])["loss"] for each in printed]
    assert found[1:] == pytest.approx(found[:1] * 2, abs=1e-6)


def test_torchrun_starts_them_as_well(folder: Path, alone: list[float], run: Run) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kitforge", "train"]
    told = run(["python", *torchrun, *command(folder, "torchrun", "parallel.data=2")], folder)
    assert losses(folder, "torchrun") == pytest.approx(alone, abs=2e-6)
    assert told.count("try next") == 1


def test_degrees_that_cannot_run_are_refused_before_a_rank_is_started(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tensor=3 does not divide model\.num_heads=4"):
        cli.run(["train", *command(folder, "refused", "parallel.tensor=3")])
    assert not (folder / "refused").exists()


def ranks_of(launcher: int, run: Path) -> list[int]:
    """The process numbers of the ranks that a launcher has started for a run, in no order."""
    found = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 1) for line in found.splitlines()]
    return [int(pid) for pid, words in rows if int(pid) != launcher and f"output_dir={run} " in f"{words} "]


def wait_for(path: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


SHARDED = ("parallel.shard=2", "trainer.checkpoint_every=1", "trainer.max_steps=12")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> list[float]:
    """The losses of a sharded run that nobody kills."""
    on_forked_ranks(folder, 2, "train", *command(folder, "whole", *SHARDED))
    return losses(folder, "whole")


# That a launcher tells of a rank that was killed is shown in test_launch, that a stopped run goes on exactly in
# test_training.
@pytest.mark.prove
@pytest.mark.parametrize("restarts", [0, 1] if "KITFORGE_PROVE" in os.environ else [1])
def test_a_killed_rank_ends_the_run_or_it_starts_again_and_ends_the_same(
    folder: Path, shims: Path, undisturbed: list[float], restarts: int
) -> None:
    run = f"killed{restarts}"
    arguments = ["train", *command(folder, run, *SHARDED, f"parallel.restarts={restarts}")]
    process = start_command(folder, shims, *arguments)
    wait_for(folder / run / "checkpoints" / "step_1")
    victim = ranks_of(process.pid, folder / run)[-1]
    wait_for(folder / run / "checkpoints" / "step_3")
    os.kill(victim, signal.SIGKILL)
    _, complaint = process.communicate(timeout=PATIENCE)
    if restarts == 0:
        assert process.returncode == 1
        assert complaint.count("error:") == 1 and "killed by SIGKILL" in complaint
        assert len(losses(folder, run)) < len(undisturbed)
        on_forked_ranks(folder, 2, *arguments, "resume=auto")
    else:
        assert process.returncode == 0, complaint
    assert losses(folder, run) == undisturbed
