"""A command starts its ranks and answers for them: one message, one exit status, nothing left behind."""

import functools
import gc
import inspect
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from kitforge.cli import main as cli
from kitforge.cli import sweep
from kitforge.cli import train as training
from kitforge.core.parallel import launch as launching
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.launch import launch
from kitforge.foundation import device as devices
from kitforge.foundation.errors import DeviceError, KitforgeError, TrainingError
from kitforge.kits.registry import kit_of
from tests.distributed.rank_program import TIMEOUT
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.distributed.rank_program")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, shims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, from which the ranks, which have imported torch, still find the package and these tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "executable", str(shims / "python"))
    # Torch's launcher asks for its caller's name with the source of the whole stack, which took most of a launch.
    monkeypatch.setattr(inspect, "stack", functools.partial(inspect.stack, 0))


def launched_ranks(deed: str, restarts: int = 0) -> int | str:
    """The status of two ranks of the program, or the words of the error that they end with."""
    # Torch's launcher leaves files open, of which these tests do not complain.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            told: int | str = launch(
                [deed], ParallelConfig(shard=2, timeout=TIMEOUT, restarts=restarts), program=PROGRAM
            )
        except KitforgeError as error:
            told = str(error)
        gc.collect()
        return told


def since_it_failed() -> float:
    """Seconds; the start of the ranks, which is long on a busy machine, does not count."""
    return time.monotonic() - float(Path("since").read_text())


def refused(deed: str) -> str:
    told = launched_ranks(deed)
    assert isinstance(told, str)
    return told


@pytest.mark.slow
def test_two_ranks_run_and_only_the_first_is_heard(capfd: pytest.CaptureFixture[str]) -> None:
    handler, environment = signal.getsignal(signal.SIGINT), dict(os.environ)
    assert launched_ranks("nothing") == 0
    shown = capfd.readouterr()
    assert shown.out == "rank 0 speaks\nended in round 0, 1 threads\n"
    assert shown.err == "rank 0 complains\n"
    assert float(Path("turn-0").read_text()) + 0.2 <= float(Path("turn-1").read_text())
    assert (signal.getsignal(signal.SIGINT), dict(os.environ)) == (handler, environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "words"),
    [
        ("raise", ["rank 1: a bad row", "row 7", "mend it"]),
        ("die", ["rank 1 was killed by SIGKILL", "out of memory", "rank 1 complains"]),
        ("differ", ["every rank: the ranks do not run the same data", "rank 1 unlike rank 0"]),
    ],
)
def test_a_rank_that_fails_is_told_by_its_number_and_at_once(
    deed: str, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    told = refused(deed)
    assert deed == "differ" or since_it_failed() < 30
    assert all(word in told for word in words), told
    assert capfd.readouterr().err == "rank 0 complains\n"


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended() -> None:
    told = refused("hang")
    assert "rank 1 died or hung" in told
    assert f"waited {TIMEOUT:g} s" in told
    # The launcher alone would wait half a minute more for a rank that does not end when asked to.
    assert since_it_failed() < TIMEOUT + 25


@pytest.mark.slow
def test_ranks_that_died_are_started_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert launched_ranks("die once", restarts=1) == 0
    assert "ended in round 1" in capfd.readouterr().out


def wait_for_a_signal() -> None:
    os.setsid()
    warnings.simplefilter("ignore", ResourceWarning)
    sys.exit(launch(["wait for a signal"], ParallelConfig(shard=2, timeout=PATIENCE), program=PROGRAM))


@pytest.mark.slow
def test_an_interrupt_reaches_every_rank_once_and_they_have_time_to_save() -> None:
    process = multiprocessing.get_context("fork").Process(target=wait_for_a_signal)
    process.start()
    wait_for(lambda: Path("ready-0").exists() and Path("ready-1").exists())
    os.kill(process.pid, signal.SIGINT)
    process.join(PATIENCE)
    assert process.exitcode == 130
    assert [Path(f"saved-{rank}").read_text() for rank in range(2)] == ["1", "1"]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


# Whose fault it was


def failure(exitcode: int, at: int, told: dict[str, object] | None = None) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file="none")
    made.timestamp = at
    made.error_file_data = {} if told is None else {"kitforge": told}
    return made


def word(text: str, at: float, *, is_cause: bool) -> dict[str, object]:
    return {"words": text, "trace": f"trace of {text}", "time": at, "is_cause": is_cause}


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ({0: failure(1, 5, word("late", 5.2, is_cause=True)), 1: failure(1, 5, word("early", 5.1, is_cause=True))},
         "rank 1: early"),
        ({0: failure(1, 5, word("peer", 5.0, is_cause=False)), 1: failure(1, 5, word("own", 5.4, is_cause=True))},
         "rank 1: own"),
        ({0: failure(1, 5, word("peer", 5.0, is_cause=False)), 1: failure(-9, 5)}, "rank 1 was killed by SIGKILL"),
        ({0: failure(1, 5, word("peer", 5.0, is_cause=False)), 1: failure(-9, 36)}, "peer"),
        ({0: failure(-15, 5), 1: failure(-11, 5)}, "rank 1 was killed by SIGSEGV"),
        ({0: failure(-15, 5), 1: failure(3, 5)}, "rank 1 exited with status 3 and wrote no error report"),
        ({0: failure(-15, 5), 1: failure(-15, 5)}, "rank 0 was ended from outside"),
    ],
)  # fmt: skip
def test_the_cause_is_told_and_not_its_consequences(
    failures: dict[int, ProcessFailure], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError) as told:
        launching._exit_code(failures, tmp_path)
    assert str(told.value).split("\n")[0] == expected


def test_the_trace_of_the_rank_is_the_cause_of_the_error(tmp_path: Path) -> None:
    with pytest.raises(TrainingError) as told:
        launching._exit_code({0: failure(1, 5, word("own", 5.0, is_cause=True))}, tmp_path)
    assert "trace of own" in str(told.value.__cause__)


def test_ranks_that_all_stopped_when_asked_were_interrupted(tmp_path: Path) -> None:
    assert launching._exit_code({0: failure(130, 5), 1: failure(-15, 5)}, tmp_path) == 130


# The command line

TRAIN = ["train", "model=llama_tiny", "data.train=corpus.txt", "data.sequence_length=32", "device=cpu"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of every launch, in the place of launching."""
    calls: list[list[str]] = []
    monkeypatch.setattr(sweep, "launch", lambda arguments, degrees, num_ranks: calls.append([*arguments]) or 0)
    return calls


def test_degrees_above_one_start_ranks_with_the_same_arguments_and_one_folder(launched: list[list[str]]) -> None:
    assert cli.run([*TRAIN, "parallel.tensor=2"]) == 0
    (arguments,) = launched
    assert arguments[:-1] == [*TRAIN, "parallel.tensor=2"]
    assert arguments[-1].startswith("output_dir='runs/")
    assert arguments[-1].endswith("-text_generation-llama_tiny'")


def test_each_member_of_a_sweep_is_launched_in_turn(launched: list[list[str]]) -> None:
    assert cli.run([*TRAIN, "-m", "parallel.shard=2", "seed=1,2", "output_dir=runs/${seed}"]) == 0
    assert [arguments[-3:] for arguments in launched] == [
        [f"seed={seed}", "output_dir=runs/${seed}", f"output_dir='runs/{seed}'"] for seed in (1, 2)
    ]


@pytest.mark.parametrize(
    "value", [1, 0.5, 1e-9, True, None, "a, b", "it's", "back\\", "${seed}", "ümlaut = 1", ["x", 1]]
)
def test_an_argument_that_is_written_is_read_as_the_same_value(value: object) -> None:
    from kitforge.composition import parse

    assert parse(sweep.argument("data.train", value)) == ("data.train", [value])


def test_finetuning_without_weights_starts_nothing(launched: list[list[str]]) -> None:
    with pytest.raises(KitforgeError, match="checkpoint=FOLDER"):
        cli.run(["finetune", *TRAIN[1:], "parallel.shard=2"])
    assert not launched


def test_a_rank_starts_no_ranks(launched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(KitforgeError, match="do not multiply"):
        cli.run([*TRAIN, "parallel.shard=2"])
    assert not launched


def test_more_ranks_than_devices_start_nothing(launched: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(devices, "count", lambda kind: 1)
    with pytest.raises(DeviceError, match="more ranks than devices"):
        cli.run([*TRAIN, "device=cuda", "parallel.shard=2"])
    assert not launched


@pytest.mark.parametrize(("restarts", "has_saved", "expected"), [(0, True, None), (1, False, None), (1, True, "auto")])
def test_ranks_that_are_started_again_go_on_from_what_was_saved(
    restarts: int, has_saved: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "TORCHELASTIC_RESTART_COUNT": restarts}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(training, "steps", lambda root: [1] if has_saved and root == Path("runs/a/checkpoints") else [])
    kit = kit_of("text_generation")
    options = kit.read_options({"output_dir": "runs/a"})
    assert training.restarted(options).resume == expected


# Other launchers


def recorded(script: list[str], tmp_path: Path, **environment: str) -> list[str]:
    """The arguments that a launcher's script gives to torchrun, which is a stand-in here, as are Slurm's commands."""
    programs = {
        "torchrun": 'printf "%s\\n" "$@"',
        "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
        "scontrol": "echo node-7; sleep 0.1; echo node-8",
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", **environment}
    done = subprocess.run(script, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_torchrun_script_hands_everything_on(tmp_path: Path) -> None:
    script = ["bash", "scripts/torchrun.sh", "model=llama_tiny", "output_dir=runs/a b"]
    given = recorded(script, tmp_path, NODES="2", MASTER_ADDR="node-0", RANKS_PER_NODE="4")
    assert given[:4] == ["--nnodes", "2", "--nproc-per-node", "4"]
    assert given[given.index("--rdzv-endpoint") + 1] == "node-0:29500"
    assert given[given.index("-m") :] == [
        "-m",
        "kitforge",
        "train",
        "model=llama_tiny",
        "output_dir=runs/a b",
        "resume=auto",
    ]


@pytest.mark.parametrize(
    ("address", "given", "warns"),
    [("127.0.1.1", {}, True), ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False), ("10.0.0.7", {}, False)],
)
def test_a_name_that_other_machines_cannot_reach_is_told(
    address: str, given: dict[str, str], warns: bool, tmp_path: Path
) -> None:
    for name, body in {"getent": f'echo "{address}  STREAM node-0"', "torchrun": "true"}.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NODES": "2", "RANKS_PER_NODE": "1", **given}
    script = ["bash", "scripts/torchrun.sh", "output_dir=runs/a"]
    done = subprocess.run(script, env=variables, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("export GLOO_SOCKET_IFNAME" in done.stderr) == warns


def test_the_slurm_script_meets_at_the_first_node(tmp_path: Path) -> None:
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node-[7-8]"}
    script = ["bash", "scripts/slurm.sbatch", "model=llama_tiny", "output_dir=runs/a", "resume=auto"]
    given = recorded(script, tmp_path, SLURM_GPUS_ON_NODE="8", ENVIRONMENT="none", **slurm)
    assert given[given.index("--rdzv-endpoint") + 1] == "node-7:20017"
    assert given[given.index("--nproc-per-node") + 1] == "8"
    assert given.count("resume=auto") == 1


def test_the_kubernetes_job_runs_its_command(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((ROOT / "scripts/kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    given = recorded([*container["command"], *container["args"]], tmp_path, **environment)
    assert given[given.index("-m") :][:3] == ["-m", "kitforge", "train"]
    assert given[-1] == "resume=auto"
    spec = job["spec"]
    assert spec["completions"] == spec["parallelism"] == int(environment["NODES"])
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["metadata"]["name"] == pod["subdomain"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["RANKS_PER_NODE"])


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_a_launcher_script_stops_at_its_first_mistake(name: str) -> None:
    path = ROOT / "scripts" / name
    assert "\nset -euo pipefail\n" in path.read_text()
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
