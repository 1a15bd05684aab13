"""Processes killed while they save, each below a root of its own; `test_killed.py` looks at what they leave."""

import itertools
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.verify.killing import die_at_operation
from tests.core.checkpoint import example, rows

LARGE = 50_000
BATCH = 16


def child(work: Callable[[], None]) -> int:
    """Run `work` in a copy of this process; returns the number of that process."""
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001 (nothing of the child may go on in its parent's place)
            traceback.print_exc()
            os._exit(1)
    return process


def save_four(root: Path) -> None:
    """Four saves: old steps are deleted, and a step is replaced."""
    writer = CheckpointWriter(root, keep_last=1)
    for step in (1, 2, 2, 3):
        example.save(writer, step)
    writer.close()


def table_of(step: int) -> rows.DictTable:
    """A table as it is at that step."""
    table = rows.DictTable()
    for number in range(1, step + 1):
        table.change(range(number, number + 6))
        table.remove([number + 1])
    return table


def save_tables(root: Path) -> None:
    """Three saves: whole, changes, whole; then the first two are deleted."""
    table = table_of(0)
    writer = CheckpointWriter(root, keep_last=1)
    writer.attach({table.name: table}, num_deltas=1)
    for step in (1, 2, 3):
        table.change(range(step, step + 6))
        table.remove([step + 1])
        rows.save(writer, step)
    writer.close()


def save_until_operation(save: Callable[[Path], None], root: Path, number: int) -> None:
    """Die at the file operation of that number, before it happens."""
    die_at_operation(number, root)
    save(root)


def save_without_end(root: Path) -> None:
    """Save steps 0, 1, 2, ..."""
    writer = CheckpointWriter(root, keep_last=2)
    for step in itertools.count():
        example.save(writer, step, size=LARGE)


def die_at_every_operation(save: Callable[[Path], None], root: Path, stride: int = 1) -> None:
    """Children die at operation 0, 1, 2, ... until one outlives them all; many at once, for they wait on the disk."""
    for first in itertools.count(step=BATCH * stride):
        numbers = range(first, first + BATCH * stride, stride)
        children = [child(partial(save_until_operation, save, root / f"{number}", number)) for number in numbers]
        if any([os.waitpid(process, 0)[1] == 0 for process in children]):
            return


def die_at_random_instants(root: Path, seed: int, count: int) -> None:
    """Children die up to a fifth of a second after their first step is published."""
    delays = random.Random(seed)
    for number in range(count):
        process = child(partial(save_without_end, root / f"{number}"))
        while not list((root / f"{number}").glob("step_*")):
            time.sleep(0.005)
        time.sleep(delays.uniform(0, 0.2))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
