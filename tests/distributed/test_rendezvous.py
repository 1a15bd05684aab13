"""Ranks meet, take turns, compare what they run, and stop together when they do not agree or one of them fails."""

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from kitforge.core.parallel import rank_errors, rendezvous
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rank_errors import LAUNCHED, explain, write_rank_report
from kitforge.core.parallel.rendezvous import Rendezvous, launch_info
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError, DataError, DeviceError, KitforgeError, PeerError, TrainingError
from tests.patience import PATIENCE

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", LAUNCHED)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "FATAL")
    # Ranks look more often at each other.
    for module in (rank_errors, rendezvous):
        monkeypatch.setattr(module, "LOOK", 0.05)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def _keep_store(port_file: str) -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Path(f"{port_file}.draft").write_text(str(kept.port))
    Path(f"{port_file}.draft").rename(port_file)
    time.sleep(3600)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of the meeting point that a launcher keeps. Its threads live in a process of their own, since ranks are
    forked from this one, and what is forked beside a running thread may inherit a lock that nobody will open."""
    port_file = tmp_path_factory.mktemp("launcher") / "port"
    process = multiprocessing.get_context("fork").Process(target=_keep_store, args=(str(port_file),), daemon=True)
    process.start()
    while not port_file.exists():
        assert process.is_alive()
        time.sleep(0.01)
    yield int(port_file.read_text())
    process.kill()
    process.join()


ROUNDS = itertools.count()


@pytest.fixture(params=["kept by the launcher", "kept by rank 0"])
def store(request: pytest.FixtureRequest, launcher: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A meeting point, in which every test is a round of its own."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(next(ROUNDS)))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    if request.param == "kept by the launcher":
        monkeypatch.setenv("MASTER_PORT", str(launcher))
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))


def meet(rank_does: Callable[[Rendezvous, int], Any], size: int = 2, **degrees: float) -> list[str]:
    """What each of `size` ranks, forked from here, returns or raises, as text."""
    Path("answers").mkdir(exist_ok=True)
    context = multiprocessing.start_processes(
        _rank, (size, rank_does, degrees), nprocs=size, start_method="fork", join=False
    )
    for process in context.processes:
        process.join(PATIENCE)
        assert not process.is_alive()
    answers = [Path(f"answers/{rank}") for rank in range(size)]
    return [answer.read_text() if answer.exists() else "nothing" for answer in answers]


def _rank(rank: int, size: int, rank_does: Callable[[Rendezvous, int], Any], degrees: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
    try:
        with Rendezvous.open(ParallelConfig(shard=size, **{"timeout": 20.0, **degrees}), "cpu") as opened:
            answer = str(rank_does(opened, rank))
    except KitforgeError as error:
        answer = f"{type(error).__name__}: {error}"
    Path(f"answers/{rank}").write_text(answer)


# Alone


def test_alone_nothing_is_entered() -> None:
    with Rendezvous.open(ParallelConfig(), "cpu") as opened:
        with opened.local_rank_zero_first():
            world = opened.init_process_group()
        opened.check_same({"data": "any"})
    assert world.mesh is None
    assert not dist.is_initialized()


def test_one_rank_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert Rendezvous.open(ParallelConfig(), "cpu").init_process_group().mesh is None


def test_several_ranks_in_one_process_are_told_how_to_start() -> None:
    with pytest.raises(ConfigError, match=r"(?s)shard=2 x tensor=2 = 4.*torchrun --nproc-per-node 4"):
        Rendezvous.open(ParallelConfig(shard=2, tensor=2), "cpu")


@pytest.mark.parametrize(
    ("degrees", "size", "words"),
    [
        ({"shard": 2}, 4, ["shard=2 = 2 of 4 ranks", "start 2 ranks"]),
        ({"data": 2, "tensor": 3}, 4, ["data=2 x tensor=3 = 6 of 4 ranks"]),
        ({}, 3, ["no axis split = 1 of 3 ranks", "parallel.shard=3"]),
    ],
)
def test_degrees_that_do_not_multiply_to_the_world_are_refused_with_the_arithmetic(
    degrees: dict[str, int], size: int, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as told:
        Rendezvous.open(ParallelConfig(**degrees), "cpu")
    assert all(word in str(told.value) for word in words)


@pytest.mark.parametrize("value", [None, "", "-1", "first"])
def test_a_launcher_that_says_nonsense_is_told_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if value is not None:
        monkeypatch.setenv("LOCAL_RANK", value)
    with pytest.raises(ConfigError, match="LOCAL_RANK"):
        launch_info()


# Devices


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "cuda"])
    monkeypatch.setattr(devices, "count", lambda kind: 2)
    assert [devices.of_rank("auto", rank, 2) for rank in range(2)] == [torch.device("cuda", rank) for rank in range(2)]
    with pytest.raises(DeviceError, match=r"(?s)4 ranks, 2 of cuda.*device=cpu"):
        devices.of_rank("cuda", 0, 4)
    with pytest.raises(DeviceError, match="cannot share one device"):
        devices.of_rank("cuda:1", 0, 2)


def test_every_rank_may_run_on_the_cpu_and_none_of_several_on_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.of_rank("cpu", 7, 8) == torch.device("cpu")
    assert [devices.backend(kind) for kind in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]
    monkeypatch.setattr(devices, "available", lambda: ["cpu", "mps"])
    with pytest.raises(DeviceError, match="several ranks cannot run on mps"):
        devices.of_rank("auto", 0, 2)


# Meeting


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        environment = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(ConfigError, match=rf"(?s)in use.*127\.0\.0\.1:{port}.*MASTER_PORT"):
            Rendezvous.open(ParallelConfig(shard=2, timeout=2), "cpu")


@pytest.mark.slow
def test_a_first_rank_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(TrainingError, match=r"(?s)rank 0 cannot be reached.*127\.0\.0\.1:1, tried for 0\.5 s"):
        Rendezvous.open(ParallelConfig(shard=2, timeout=0.5), "cpu")


def test_a_launcher_that_names_no_meeting_point_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"(?s)not whole.*MASTER_ADDR"):
        Rendezvous.open(ParallelConfig(shard=2), "cpu")


def joined_twice(opened: Rendezvous, rank: int) -> list[Any]:
    with opened.local_rank_zero_first():
        pass
    first = opened.init_process_group()
    opened.check_same({"data": "alike"})
    again = Rendezvous.open(ParallelConfig(shard=2, timeout=PATIENCE), "cpu")
    with again.local_rank_zero_first():
        pass
    second = again.init_process_group()
    # What was agreed on the first time says nothing of the second.
    with pytest.raises(ConfigError, match="the same data"):
        again.check_same({"data": str(rank)})
    again.shutdown(failed=False)
    return [first.all_gather_object(rank), second.all_gather_object(rank), first.any(rank == 1)]


def test_ranks_become_one_world_and_may_meet_again_in_the_same_process(store: None) -> None:
    assert meet(joined_twice) == ["[[0, 1], [0, 1], True]"] * 2


def in_turn(opened: Rendezvous, rank: int) -> float:
    with opened.local_rank_zero_first():
        began = time.monotonic()
        time.sleep(0.4 if rank == 0 else 0)
        return began


@pytest.mark.slow
def test_the_first_rank_of_a_machine_goes_first_and_the_others_after_it(store: None) -> None:
    first, *others = map(float, meet(in_turn, 3))
    assert all(other >= first + 0.4 for other in others)


def looks_seldom(opened: Rendezvous, rank: int) -> str:
    if rank > 0:
        rendezvous.time = SimpleNamespace(sleep=lambda _seconds: time.sleep(0.5 + 0.2 * rank))
    with opened.local_rank_zero_first():
        return "left"


@pytest.mark.slow
def test_the_store_of_the_first_rank_outlives_those_who_look_for_the_end_of_a_turn_later(store: None) -> None:
    assert meet(looks_seldom, 3) == ["left"] * 3


def fails_in_turn(opened: Rendezvous, rank: int) -> None:
    with opened.local_rank_zero_first():
        raise DataError("the corpus is empty")


@pytest.mark.slow
def test_a_first_rank_that_fails_in_its_turn_ends_the_waiting(store: None) -> None:
    started = time.monotonic()
    first, second = meet(fails_in_turn, timeout=4 * PATIENCE)
    assert time.monotonic() - started < PATIENCE
    assert first == "DataError: the corpus is empty"
    assert second.startswith("PeerError: rank 0 failed: the corpus is empty")


def finds(opened: Rendezvous, rank: int) -> str:
    return opened.found_by_rank_zero(lambda: f"found by {rank}")


def fails_to_find(opened: Rendezvous, rank: int) -> str:
    def find() -> str:
        raise DataError(f"rank {rank} finds nothing")

    return opened.found_by_rank_zero(find)


@pytest.mark.slow
def test_what_the_first_rank_finds_all_have_and_its_failure_too(store: None) -> None:
    assert meet(finds) == ["found by 0"] * 2
    first, second = meet(fails_to_find, timeout=4 * PATIENCE)
    assert first == "DataError: rank 0 finds nothing"
    assert second.startswith("PeerError: rank 0 failed: rank 0 finds nothing")


# Agreement


def differing(opened: Rendezvous, rank: int) -> None:
    opened.check_same({"configuration": "same", "training text": "other" if rank == 2 else "one"})


def lacking(opened: Rendezvous, rank: int) -> None:
    opened.check_same({"configuration": "same"} | ({} if rank == 2 else {"training text": "one"}))


def other_code(opened: Rendezvous, rank: int) -> None:
    version = "2" if rank == 2 else "1"
    rendezvous.code_version = lambda: version
    opened.check_same({"configuration": "same", "training text": "one"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "differs", "is_alike"),
    [
        (differing, "training text", "configuration"),
        (lacking, "training text", "configuration"),
        (other_code, "code", "training text"),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(
    facts: Callable[[Rendezvous, int], None], differs: str, is_alike: str, store: None
) -> None:
    answers = meet(facts, 3)
    assert len(set(answers)) == 1
    assert answers[0].startswith(f"ConfigError: the ranks do not run the same {differs}\n")
    assert f"{differs}: rank 2 unlike rank 0, 1" in answers[0]
    assert is_alike not in answers[0]


def test_the_version_of_the_code_changes_with_any_source_file(tmp_path: Path) -> None:
    for name, line in (("one", "x = 1"), ("alike", "x = 1"), ("other", "x = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.py").write_text(line)
    one, alike, other = (rendezvous.code_version(tmp_path / name) for name in ("one", "alike", "other"))
    assert one == alike != other


# Failure


def dies(opened: Rendezvous, rank: int) -> None:
    world = opened.init_process_group()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(100):
        world.all_gather_object(rank)


def hangs(opened: Rendezvous, rank: int) -> None:
    world = opened.init_process_group()
    if rank == 1:
        time.sleep(600)
    world.all_gather_object(rank)


def fails(opened: Rendezvous, rank: int) -> None:
    world = opened.init_process_group()
    if rank == 1:
        raise DataError("a bad row")
    for _ in range(100):
        world.all_gather_object(rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "first", "second"),
    [
        (dies, "PeerError: rank 1 died\n", "nothing"),
        (fails, "PeerError: rank 1 failed: a bad row\n", "DataError: a bad row"),
    ],
)
def test_a_rank_that_fails_ends_the_others_which_name_it(
    deed: Callable[[Rendezvous, int], None], first: str, second: str, store: None
) -> None:
    started = time.monotonic()
    answers = meet(deed, timeout=10)
    assert answers[0].startswith(first)
    assert answers[1] == second
    assert time.monotonic() - started < PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("store", ["kept by rank 0"], indirect=True)
def test_a_rank_that_hangs_is_named_and_ended_by_its_watch(store: None) -> None:
    """As it would sleep on; with a store of a launcher in test_launch."""
    first, second = meet(hangs, timeout=5)
    assert first.startswith("PeerError: rank 1 died or hung\n")
    assert second == "nothing"


def test_only_errors_of_other_ranks_are_explained() -> None:
    timeout = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation")
    assert "waited 5 s" in str(explain(timeout, waited=5))
    assert "rank 3 died" in str(explain(dist.DistNetworkError("connection reset by peer"), silent=[3]))
    assert explain(RuntimeError("shape mismatch")) is None
    assert explain(DataError("a bad row")) is None


def test_a_word_is_left_for_the_launcher_and_the_same_one_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert write_rank_report("alone", "", is_cause=True)
    said = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / str(rank) / "error.json"))
        said.append(write_rank_report("the same", "", is_cause=True))
    assert said == [True, False]
    assert (tmp_path / "1" / "error.json").exists()
    monkeypatch.setenv(LAUNCHED, "1")
    assert not write_rank_report("to the parent", "", is_cause=True)


def test_a_peer_s_failure_is_no_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    rank_errors.report_error(PeerError("rank 1 died"), "rank 1 died")
    assert '"is_cause": false' in (tmp_path / "0" / "error.json").read_text()
