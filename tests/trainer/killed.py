"""A run that is killed again and again, at random instants, until it has reached its end.

`python -m tests.trainer.killed FOLDER CORPUS KIND SEED` prints how many processes were killed on the way.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from tests.trainer import tiny

OPTIONS = {
    "trainer.max_steps": 12,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 2,
    "trainer.log_every": 5,
    "trainer.evaluate_every": 4,
    "trainer.evaluate_first": True,
}
# After so many the run may go on undisturbed, however slow the machine is.
MOST_KILLS = 10


def start(folder: Path, corpus: Path, kind: str) -> int:
    """A process that trains to the end, from the newest checkpoint on; returns its number."""
    process = os.fork()
    if process == 0:
        tiny.run(folder, corpus, tiny.KINDS[kind] | OPTIONS | {"resume": "auto"})
        os._exit(0)
    return process


def has_ended_within(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(process, os.WNOHANG)[0] == process:
            return True
        time.sleep(0.001)
    return False


def main(folder: Path, corpus: Path, kind: str, seed: int) -> int:
    """Returns the number of kills."""
    torch.set_num_threads(1)
    # The first run tells how long one takes, and fills the cache of tokens.
    started = time.monotonic()
    os.waitpid(start(folder.with_name(f"{folder.name} timed"), corpus, kind), 0)
    duration = time.monotonic() - started
    delays = random.Random(seed)
    for kills in range(MOST_KILLS):
        process = start(folder, corpus, kind)
        if has_ended_within(process, delays.uniform(0.1, 0.9) * duration):
            return kills
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    os.waitpid(start(folder, corpus, kind), 0)
    return MOST_KILLS


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))}\n")
