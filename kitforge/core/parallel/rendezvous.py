"""Rendezvous of the ranks of a run: connection, turns, comparison of configurations, process group, shutdown.

It reads the environment that torchrun or `launch` sets, and starts no process. With one process it does nothing.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rank_errors import (
    RESUME,
    FailureMonitor,
    describe_error,
    explain,
    first_failure,
    is_timeout,
    publish_failure,
)
from kitforge.core.parallel.world import World
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError, DeviceError, KitforgeError, PeerError, TrainingError

# Seconds between two polls of a key of another rank, and seconds that ranks wait for one another's errors.
LOOK, PATIENCE = 0.5, 1.0
PACKAGE = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchInfo:
    """The environment of a launched process: its rank and local rank."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    restarts: int = 0  # restarts of the ranks so far

    @property
    def round(self) -> str:
        """A prefix of store keys that no earlier start used, as the store may outlive the ranks."""
        return f"kitforge/{self.restarts}"


def launch_info() -> LaunchInfo | None:
    """The launch environment of this process; None without a launcher."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank = _number("RANK")
    local_rank = _number("LOCAL_RANK")
    return LaunchInfo(
        rank=rank,
        world_size=_number("WORLD_SIZE"),
        local_rank=local_rank,
        local_world_size=_number("LOCAL_WORLD_SIZE", local_rank + 1),
        node=os.environ.get("GROUP_RANK", socket.gethostname()),
        restarts=_number("TORCHELASTIC_RESTART_COUNT", 0),
    )


class Rendezvous:
    """Connects a rank to its run: `with Rendezvous.open(...) as rendezvous`, then turns, check_same, process group."""

    def __init__(
        self, degrees: ParallelConfig, device: torch.device, where: LaunchInfo | None, store: Store | None
    ) -> None:
        self.device = device
        self._degrees = degrees
        self._launch = where
        self._store = store
        # From the start, as a rank may work alone for hours before it joins the process group.
        self._watch = None if where is None or store is None else FailureMonitor(cast(Any, store).clone(), where.rank)
        self._world: World | None = None
        self._has_joined = False
        self._num_turns = 0
        self._num_checks = 0

    @classmethod
    def open(cls, degrees: ParallelConfig, device: str, num_ranks: int | None = None) -> Rendezvous:
        """Connect to the other ranks: those of the degrees and, up to `num_ranks`, inference-only ones. Raises
        ConfigError for another number of started ranks, and DeviceError for fewer accelerators than local ranks."""
        where, wanted = launch_info(), num_ranks or degrees.world_size
        if where is None and wanted > 1:
            further = f" and {wanted - degrees.world_size} beside" if wanted > degrees.world_size else ""
            raise ConfigError(
                "a run of several ranks has to be launched",
                got=f"{degrees.describe()} ranks{further} in one process",
                expected="a process per rank",
                fix=f"kitforge train starts them by itself; or torchrun --nproc-per-node {wanted} with this program",
            )
        if where is not None:
            degrees.check_world(where.world_size, wanted)
        if where is None or where.world_size == 1:
            return cls(degrees, devices.pick(device), None, None)
        own = devices.of_rank(device, where.local_rank, where.local_world_size)
        # The launcher's store still has the keys of the previous start, and machines count restarts differently.
        has_restarts = _launcher_keeps_store() and _number("TORCHELASTIC_MAX_RESTARTS", 0) > 0
        if has_restarts and _number("GROUP_WORLD_SIZE", 1) > 1:
            raise ConfigError(
                "ranks on several machines cannot be restarted with a store that torchrun keeps",
                fix="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every machine (scripts/torchrun.sh does), "
                "or --max-restarts 0",
            )
        store = PrefixStore(where.round, _connect_store(degrees))
        # A program may run several runs in sequence, each with its own keys.
        number = store.add(f"opened/{where.rank}", 1)
        return cls(degrees, own, where, PrefixStore(str(number), store))

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._watch is not None and error is not None:
            self._watch.publish(error)
        explained = None if error is None else self.explain(error)
        self.shutdown(failed=error is not None, words="" if error is None else describe_error(explained or error))
        if explained is not None:
            raise explained from error

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return 0 if self._launch is None else self._launch.rank

    @contextmanager
    def local_rank_zero_first(self) -> Iterator[None]:
        """Local rank 0 of each machine runs the block first, then the others; all leave it together.

        The block may take hours. A failure in it ends the waiting of all other ranks at once.
        """
        if self._launch is None or self._store is None:
            yield
            return
        self._num_turns += 1
        done = f"turn/{self._num_turns}"
        if self._launch.local_rank > 0:
            self._wait(f"{done}/{self._launch.node}")
        try:
            yield
        except BaseException as error:
            with suppress(dist.DistError):
                publish_failure(self._store, self._launch.rank, describe_error(error))
            raise
        if self._launch.local_rank == 0:
            self._store.set(f"{done}/{self._launch.node}", "done")
        if self._store.add(f"{done}/count", 1) == self._launch.world_size:
            self._store.set(f"{done}/all", "done")
        self._wait(f"{done}/all")

    def found_by_rank_zero(self, find: Callable[[], str]) -> str:
        """What rank 0 finds, on all ranks, which may take minutes. Its failure is one of all ranks."""
        if self._launch is None or self._store is None:
            return find()
        self._num_turns += 1
        name = f"found/{self._num_turns}"
        if self.rank == 0:
            self._store.set(name, find())
        self._wait(name)
        return self._store.get(name).decode()

    def init_process_group(self) -> World:
        """Create the process groups and return the world. A second call returns the same one."""
        if self._world is not None:
            return self._world
        if self._launch is None or self._store is None:
            return World(device=self.device)
        backend = devices.backend(self.device.type)
        if not dist.is_backend_available(backend):
            raise DeviceError(f"this torch was built without {backend}", got=self.device, fix="device=cpu uses gloo")
        devices.use(self.device)
        # A program under torchrun may have created the default process group, and then destroys it too.
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=self._store,
                rank=self._launch.rank,
                world_size=self._launch.world_size,
                timeout=timedelta(seconds=self._degrees.timeout),
                device_id=None if self.device.type == "cpu" else self.device,
            )
            self._has_joined = True
        self._world = World.of_process_group(self._degrees, self.device, self._watch)
        return self._world

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise ConfigError on all ranks, with the fact and the ranks, unless facts and code are equal on all ranks."""
        if self._launch is None or self._store is None:
            return
        self._num_checks += 1
        name = f"facts/{self._num_checks}"
        hashes = {
            fact: hashlib.sha256(value.encode()).hexdigest()
            for fact, value in {**facts, "code": code_version()}.items()
        }
        self._store.set(f"{name}/{self._launch.rank}", json.dumps(hashes))
        if self._launch.rank == 0:
            explained = [json.loads(self._store.get(f"{name}/{rank}")) for rank in range(self._launch.world_size)]
            self._store.set(f"{name}/verdict", json.dumps(_differences(explained)))
        differences = json.loads(self._store.get(f"{name}/verdict"))
        # Rank 0 may own the store, and ends if facts differ.
        if self._store.add(f"{name}/read", 1) == self._launch.world_size:
            self._store.set(f"{name}/all", "read")
        self._store.wait([f"{name}/all"])
        if differences:
            raise ConfigError(
                f"the ranks do not run the same {' and the same '.join(differences)}",
                got="; ".join(f"{fact}: {words}" for fact, words in differences.items()),
                expected="all ranks alike",
                fix="start every rank with the same command, package and files",
            )

    def explain(self, error: BaseException) -> KitforgeError | None:
        """`explain`, with the ranks that did not respond, or the one that reported a failure."""
        is_explained = isinstance(error, PeerError)
        if self._launch is None or self._store is None or not (is_explained or explain(error)):
            return None
        waited = self._degrees.timeout if is_timeout(error) else None
        with suppress(dist.DistError):
            # The store may have ended with rank 0.
            known = None if self._watch is None else self._watch.first
            if (first := known or first_failure(self._store)) is not None:
                return PeerError(f"rank {first['rank']} failed: {first['words']}", fix=RESUME)
            if not is_explained:
                # The ranks that have not reported that they wait.
                self._store.set(f"waits/{self._launch.rank}", "")
                silent = [rank for rank in range(self._launch.world_size) if rank != self._launch.rank]
                until = time.monotonic() + PATIENCE
                while time.monotonic() < until:
                    time.sleep(0.1)
                    silent = [rank for rank in silent if not self._store.check([f"waits/{rank}"])]
                return explain(error, waited=waited, silent=silent)
        return explain(error, waited=waited)

    def shutdown(self, *, failed: bool, words: str = "") -> None:
        """Leave the run; after a failure of this rank, report it and do not wait for the others."""
        if self._launch is None or self._store is None:
            return
        if failed:
            if self._watch is not None:
                self._watch.report(words)
            with suppress(dist.DistError):
                publish_failure(self._store, self._launch.rank, words)
        if self._has_joined and dist.is_initialized():
            if failed and (group := dist.group.WORLD) is not None:
                with suppress(RuntimeError):
                    group.abort()
            dist.destroy_process_group()
        if not _launcher_keeps_store():
            # The store ends with the process of rank 0: leave the others time to read it.
            if failed and self._launch.rank == 0:
                time.sleep(2 * LOOK)
            elif not failed and not self._has_joined:
                self._leave_last()
        # It ends this process if one of the calls above does not return.
        if self._watch is not None:
            self._watch.end(failed=failed)

    def _leave_last(self) -> None:
        """Rank 0 waits until all others have come here, or one has failed: no process group ends with them together."""
        assert self._launch is not None and self._store is not None
        with suppress(dist.DistError, PeerError):
            if self._store.add("left", 1) == self._launch.world_size:
                self._store.set("left/all", "done")
            if self._launch.rank == 0:
                self._wait("left/all")

    def _wait(self, name: str) -> None:
        """Wait without time-out until a rank has set `name`. Raises PeerError as soon as a rank has failed."""
        assert self._store is not None
        pause = 0.01
        while not self._store.check([name]):
            if (first := first_failure(self._store)) is not None:
                raise PeerError(f"rank {first['rank']} failed: {first['words']}", fix=RESUME)
            time.sleep(pause)
            pause = min(2 * pause, LOOK)


@contextmanager
def joined(degrees: ParallelConfig, device: str, num_ranks: int) -> Iterator[Rendezvous]:
    """The ranks of all runs of this process with these degrees. They stay joined until it ends, as a trained model may
    lie on all of them, or until a run fails."""
    rendezvous = _opened(degrees, device, num_ranks)
    try:
        yield rendezvous
    except BaseException as error:
        _opened.cache_clear()
        rendezvous.__exit__(type(error), error, error.__traceback__)
        raise


@cache
def _opened(degrees: ParallelConfig, device: str, num_ranks: int) -> Rendezvous:
    rendezvous = Rendezvous.open(degrees, device, num_ranks)
    atexit.register(rendezvous.shutdown, failed=False)
    return rendezvous


@cache
def code_version(package: Path = PACKAGE) -> str:
    """The version of the package and of torch, and a hash of the package's source files: 0.1 s, once a process."""
    paths = sorted(package.rglob("*.py"))
    code = b"".join(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0" for path in paths)
    try:
        version = importlib.metadata.version("kitforge")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return f"{version} on torch {torch.__version__}, {hashlib.sha256(code).hexdigest()}"


def _connect_store(degrees: ParallelConfig) -> Store:
    """The TCP store of the launch environment."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    timeout = timedelta(seconds=degrees.timeout)
    try:
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                "the port at which the ranks are to meet is in use",
                got=where,
                expected="a free port on the machine of rank 0",
                fix="choose another MASTER_PORT, or wait until the other run has ended",
            ) from None
        raise TrainingError(
            "rank 0 cannot be reached",
            got=f"{where}, tried for {degrees.timeout:g} s",
            expected="all ranks to start within parallel.timeout",
            fix="see that MASTER_ADDR and MASTER_PORT name the machine of rank 0, and that no firewall is between",
        ) from error
    except ValueError as error:
        raise ConfigError("the launcher's environment is not whole", got=error, fix="use torchrun") from None
    store.set_timeout(timeout)
    return store


def _launcher_keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise ConfigError(f"the launcher's environment has no usable {name}", got=repr(text), expected="a whole number")
    return int(text)


def _differences(reported: list[dict[str, str]]) -> dict[str, str]:
    """The facts that differ between ranks, each with the ranks of every value."""
    result = {}
    for fact in sorted({fact for facts in reported for fact in facts}):
        groups: dict[str | None, list[int]] = {}
        for rank, facts in enumerate(reported):
            groups.setdefault(facts.get(fact), []).append(rank)
        if len(groups) > 1:
            # The value of most ranks first.
            most, *others = sorted(groups.values(), key=len, reverse=True)
            words = f"rank {_rank_list(sorted(sum(others, [])))} unlike rank {_rank_list(most)}"
            result[fact] = words
    return result


def _rank_list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
