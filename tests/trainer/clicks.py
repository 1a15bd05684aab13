"""Runs of a tiny click model over a table of rows, and what they leave behind, for comparison bit by bit."""

import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import Checkpoint
from kitforge.core.optim.row_optimizers import SparseOptimizerConfig, build_row_optimizer
from kitforge.core.optim.table_protocols import ROWS
from kitforge.core.parallel.world import ALONE, World
from kitforge.embedding_cache.keys.row_init import RowInitConfig
from kitforge.embedding_cache.options import AdmissionOptions, ExpiryOptions, PolicyOptions
from kitforge.embedding_cache.table import CachedEmbedding
from kitforge.foundation.config import from_dict
from kitforge.foundation.types import Cursor, MicroBatch, Sums
from kitforge.trainer.loop import Loop
from kitforge.trainer.options import RunOptions
from kitforge.trainer.run_folder import make_loop, train
from kitforge.trainer.task import Task
from kitforge.verify.run_equality import last_checkpoint, tables_in
from tests.sharded_table import ShardedTable
from tests.trainer import tiny

DIM = 4
BATCH = 12
MOST_KILLS = 4
# A table of a run in that folder.
MakeTable = Callable[[World, Path], nn.Module]


def sharded(optimizer: str) -> MakeTable:
    """A table in memory."""

    def make(world: World, _: Path) -> nn.Module:
        rule = build_row_optimizer(SparseOptimizerConfig(name=optimizer))  # type: ignore[arg-type]
        group = None if world.mesh is None else world.mesh.world
        return ShardedTable(RowInitConfig(name="clicks", dim=DIM), rule, group)

    return make


def cached(optimizer: str, *, file: bool = False, **options: Any) -> MakeTable:
    """A table in tiers, the first of which holds hardly more than a batch needs."""

    def make(world: World, folder: Path) -> nn.Module:
        path = str(folder / "rows") if file else None
        return CachedEmbedding(None, DIM, optimizer=optimizer, name="clicks", mode=None, path=path, **options)  # type: ignore[arg-type]

    return make


# Kinds of tables whose resumption has something of its own to go wrong.
KINDS: dict[str, MakeTable] = {
    "adagrad": sharded("adagrad"),
    "dense adam by catch-up": sharded("adam"),
    "ftrl": sharded("ftrl"),
    "adagrad in two tiers": cached("adagrad", device_rows=16, policy=PolicyOptions(name="lfu")),
    "dense adam in three tiers": cached("adam", device_rows=16, host_rows=9, file=True),
    "forgetful ftrl": cached(
        "ftrl",
        device_rows=17,
        host_rows=5,
        file=True,
        admission=AdmissionOptions(name="count", count=2),
        expiry=ExpiryOptions(every=3, max_age=2),
    ),
}


class Clicks(nn.Module):
    """Rows of a table through two layers."""

    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList([nn.Linear(DIM, 5), nn.Linear(5, 1)])

    def forward(self, ids: Tensor) -> Tensor:
        first, second = self.layers
        answer: Tensor = second(torch.tanh(first(self.table(ids).sum(1))))
        return answer


class ClickTask(Task):
    """Twelve samples a step, all from a generator of the step's own. Ids come back after a pause."""

    def __init__(self, make_table: MakeTable, folder: Path) -> None:
        self._make_table = make_table
        self._folder = folder

    def build(self, world: World) -> nn.Module:
        self._world = world
        return Clicks(self._make_table(world, self._folder))

    def steps(self, model: nn.Module, cursor: Cursor) -> Iterator[list[MicroBatch]]:
        for step in range(cursor.step, 1000):
            generator = torch.Generator().manual_seed(step)
            ids = (torch.randint(0, 15, (BATCH, 3), generator=generator) + 5 * (step % 4)) * 10**12 - 10**13
            targets = torch.randn(BATCH, 1, generator=generator)
            mine = slice(self._world.replica, None, self._world.num_replicas)
            yield [{"ids": ids[mine], "targets": targets[mine]}]

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        return {"loss": ((model(micro_batch["ids"]) - micro_batch["targets"]) ** 2).sum()}


def begin(folder: Path, make_table: MakeTable, world: World = ALONE, **choices: Any) -> tuple[Loop, RunOptions]:
    """A run in `folder`, ready to start; `choices` are trainer options, and `resume`."""
    resume = choices.pop("resume", None)
    trainer = {"max_steps": 8, "checkpoint_every": 2, "progress": False, "save_total_limit": 20} | choices
    values = {"trainer": trainer, "optimizer": {"learning_rate": 0.1}, "resume": resume, "device": "cpu"}
    options = from_dict(RunOptions, values)
    return make_loop(ClickTask(make_table, folder), options, folder, world=world, config={}, callbacks=()), options


def run(folder: Path, make_table: MakeTable, world: World = ALONE, **choices: Any) -> Loop:
    """Begin and train to the end."""
    loop, options = begin(folder, make_table, world, **choices)
    train(loop, options, folder, "")
    return loop


def last(folder: Path) -> Checkpoint:
    """The newest checkpoint of a run."""
    return last_checkpoint(folder)


def assert_same(got: Path, wanted: Path) -> None:
    """Two runs ended alike, bit for bit, and told the same on the way."""
    tiny.assert_same(got, wanted)
    assert tables_in(last(got))["clicks"][ROWS]


def die(folder: Path, kind: str, choices: Mapping[str, Any], kill_after: float) -> tuple[bool, float]:
    """Train to the end in a process of its own, which dies once it has computed for `kill_after` seconds (0: never).
    Returns whether it died, and how many seconds it computed."""
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, kill_after)
            run(folder, KINDS[kind], resume="auto", **choices)
            os._exit(0)
        except BaseException:  # noqa: BLE001 (nothing of the child may go on in its parent's place)
            traceback.print_exc()
            os._exit(1)
    _, status, usage = os.wait4(process, 0)
    assert status in (0, signal.SIGPROF), f"the run failed with status {status}"
    return status != 0, usage.ru_utime + usage.ru_stime


def kill_again_and_again(folder: Path, kind: str, seed: int) -> int:
    """Leaves the run in `folder` and one that nobody killed beside it, in `whole`; returns the number of kills."""
    choices = {"max_steps": 12, "checkpoint_every": 1, "incremental_checkpoints": 2, "save_total_limit": 2}
    # What is made on first use is there when the processes part; the second run then tells how long one takes.
    run(folder.with_name("first"), KINDS[kind], **choices)
    _, duration = die(folder.with_name("whole"), kind, choices, 0.0)
    delays = random.Random(seed)
    kills = 0
    while kills < MOST_KILLS:
        was_killed, seconds = die(folder, kind, choices, delays.uniform(0.1, 0.7) * duration)
        if not was_killed and kills:
            return kills
        if not was_killed:
            # It was quicker than the one that told how long it takes.
            duration = seconds
            shutil.rmtree(folder)
        kills += was_killed
    die(folder, kind, choices, 0.0)
    return MOST_KILLS
