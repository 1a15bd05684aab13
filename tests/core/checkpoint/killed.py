"""A process that is killed while it saves. `test_killed.py` starts it and looks at what it leaves.

`operation ROOT`: one child for every file operation of four saves, killed at that operation; each has a root of its own
below ROOT. `instant ROOT SEED COUNT`: children that save larger states without end, killed at a random time.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from kitforge.core.checkpoint.save import CheckpointWriter
from tests.core.checkpoint import example

FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}
LARGE = 50_000
BATCH = 16


def child(work: Callable[[], None]) -> int:
    """Run `work` in a copy of this process; returns the number of that process."""
    process = os.fork()
    if process == 0:
        torch.set_num_threads(1)
        work()
        os._exit(0)
    return process


def save_four(root: Path) -> None:
    """Four saves: old steps are deleted, and a step is replaced."""
    writer = CheckpointWriter(root, keep_last=1)
    for step in (1, 2, 2, 3):
        example.save(writer, step)
    writer.close()


def save_until_operation(root: Path, number: int) -> None:
    """Die at the file operation of that number, before it happens."""
    count = itertools.count()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_EVENTS and str(root) in str(arguments[0]) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_four(root)


def save_without_end(root: Path) -> None:
    """Save steps 0, 1, 2, ..."""
    writer = CheckpointWriter(root, keep_last=2)
    for step in itertools.count():
        example.save(writer, step, size=LARGE)


def die_at_every_operation(root: Path) -> None:
    """Children die at operation 0, 1, 2, ... until one outlives them all; many at once, for they wait on the disk."""
    for first in itertools.count(step=BATCH):
        numbers = range(first, first + BATCH)
        children = [child(partial(save_until_operation, root / f"{number}", number)) for number in numbers]
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


if __name__ == "__main__":
    if sys.argv[1] == "operation":
        die_at_every_operation(Path(sys.argv[2]))
    else:
        die_at_random_instants(Path(sys.argv[2]), seed=int(sys.argv[3]), count=int(sys.argv[4]))
