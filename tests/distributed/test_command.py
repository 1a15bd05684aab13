"""The command line on several ranks: it starts them, torchrun starts them, one dies, and the losses stay the same."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.training import BASE, LLAMA, write_text

pytestmark = pytest.mark.slow
CHECKOUT = Path(__file__).parents[2]
ARGUMENTS = [f"{name}={json.dumps(value)}" for name, value in {**LLAMA, **BASE, "trainer.progress": True}.items()]


def command(folder: Path, run: str, *further: str) -> list[str]:
    arguments = [*ARGUMENTS, f"data.train={folder / 'text.txt'}", f"data.cache={folder / 'cache'}"]
    return [*arguments, f"output_dir={folder / run}", *further]


def environment() -> dict[str, str]:
    places = [str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


def kitforge(folder: Path, *arguments: str, program: tuple[str, ...] = ("-m", "kitforge")) -> Any:
    return subprocess.run(
        [sys.executable, *program, *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def losses(folder: Path, run: str) -> list[float]:
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("command")
    write_text(place)
    alone = kitforge(place, "train", *command(place, "alone"))
    assert alone.returncode == 0, alone.stderr
    return place


def test_it_starts_its_own_ranks_and_one_of_them_speaks(folder: Path) -> None:
    done = kitforge(folder, "train", *command(folder, "four", "parallel.tensor=2", "parallel.shard=2"))
    assert done.returncode == 0, done.stderr
    assert losses(folder, "four") == pytest.approx(losses(folder, "alone"), abs=2e-6)
    assert done.stdout.count("step 12/12") == 1
    assert done.stdout.count("try next") == 1
    evaluated = [
        kitforge(
            folder,
            "evaluate",
            f"checkpoint={folder / run}",
            f"data.eval={folder / 'text.txt'}",
            "device=cpu",
            "data.sequence_length=16",
            f"data.cache={folder / 'cache'}",
            *degrees,
        )
        for run, degrees in (("four", []), ("four", ["parallel.data=2"]), ("four", ["parallel.tensor=2"]))
    ]
    found = [json.loads(each.stdout.splitlines()[-1])["loss"] for each in evaluated]
    assert found[1:] == pytest.approx(found[:1] * 2, abs=1e-6)


def test_torchrun_starts_them_as_well(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "kitforge")
    arguments = command(folder, "torchrun", "parallel.data=2")
    done = kitforge(folder, "train", *arguments, program=torchrun)
    assert done.returncode == 0, done.stderr
    assert losses(folder, "torchrun") == pytest.approx(losses(folder, "alone"), abs=2e-6)
    assert done.stdout.count("try next") == 1


def test_degrees_that_cannot_run_are_refused_before_a_rank_is_started(folder: Path) -> None:
    refused = kitforge(folder, "train", *command(folder, "refused", "parallel.tensor=3"))
    assert refused.returncode == 1
    assert "parallel.tensor=3 does not divide model.num_heads=4" in refused.stderr
    assert not (folder / "refused").exists()


def ranks_of(parent: int) -> list[int]:
    """The process numbers of the ranks that a launcher has started, in no order."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [int(pid) for pid, ppid, words in rows if int(ppid) == parent and "kitforge" in words]


def wait_for(path: Path, seconds: float = 120.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_rank_ends_the_run_or_it_starts_again_and_ends_the_same(folder: Path, restarts: int) -> None:
    run = f"killed{restarts}"
    degrees = (
        "parallel.shard=2",
        f"parallel.restarts={restarts}",
        "trainer.checkpoint_every=1",
        "trainer.max_steps=60",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "kitforge", "train", *command(folder, run, *degrees)],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder / run / "checkpoints" / "step_5")
    os.kill(ranks_of(process.pid)[-1], signal.SIGKILL)
    _, complaint = process.communicate(timeout=240)
    if restarts == 0:
        assert process.returncode == 1
        assert complaint.count("error:") == 1 and "killed by SIGKILL" in complaint
        again = kitforge(folder, "train", *command(folder, run, *degrees, "resume=auto"))
        assert again.returncode == 0, again.stderr
    else:
        assert process.returncode == 0, complaint
    whole = kitforge(folder, "train", *command(folder, f"whole{restarts}", *degrees))
    assert whole.returncode == 0, whole.stderr
    assert losses(folder, run) == losses(folder, f"whole{restarts}")
