"""Runs that end without a word: by SIGKILL at an instant of training, or at a file operation of a save."""

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kitforge.core.checkpoint.manifest import steps
from kitforge.verify.processes import Process

FILE_EVENTS = {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}
# Seconds between two looks at a run that is to be killed.
LOOK = 0.002
SETTLE = 0.05


def die_at_operation(number: int, root: Path, *, published: int = 0) -> None:
    """Have this process die by SIGKILL at the file operation of that number below `root`, before it happens; those
    before so many steps are published there are not counted."""
    count = itertools.count()

    def hook(event: str, arguments: Sequence[object]) -> None:
        if event not in FILE_EVENTS or str(root) not in str(arguments[0]) or len(steps(root)) < published:
            return
        if next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def die_before_backward(number: int) -> None:
    """Have this process die by SIGKILL before its backward pass of that number, counted from 0: between two steps,
    whoever writes the files, and however. Writers of PyTorch and safetensors raise no event of `die_at_operation`."""
    count = itertools.count()

    def counted(run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if next(count) == number:
            # A thread that saves may end before.
            time.sleep(SETTLE)
            os.kill(os.getpid(), signal.SIGKILL)
        return run(*arguments, **options)

    for name in ("backward", "grad"):
        setattr(torch.autograd, name, partial(counted, getattr(torch.autograd, name)))


def kill_again_and_again(
    start: Callable[[Callable[[], None]], Process],
    folder: Path,
    *,
    instants: int,
    saves: int,
    seed: int,
    timeout: float,
) -> int:
    """Kill the run in `folder` at drawn instants and during drawn saves, and let it end; the number of kills.

    `start(prepare)` starts or resumes the run in a process that first calls `prepare`. It dies in saves first, which
    leave a step to resume from, and then after the first or the second line that a process writes.
    """
    draw = random.Random(seed)
    kills = 0
    for _ in range(saves):
        number = draw.randrange(24)
        prepare = partial(die_at_operation, number, folder / "checkpoints", published=1)
        kills += not start(prepare).ended(timeout)
    for _ in range(instants):
        process, line, delay = start(lambda: None), draw.randint(1, 2), draw.uniform(0, 0.05)
        metrics = folder / "metrics.jsonl"
        fewest, until = _num_lines(metrics), time.monotonic() + timeout
        while process.is_alive and time.monotonic() < until and _num_lines(metrics) < fewest + line:
            # A run that goes on drops the lines after its checkpoint.
            fewest = min(fewest, _num_lines(metrics))
            time.sleep(LOOK)
        time.sleep(delay)
        kills += process.is_alive
        process.kill()
    start(lambda: None).result(timeout)
    return kills


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0
