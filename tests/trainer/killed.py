"""A run that is killed again and again, at random instants, until it has reached its end.

`python -m tests.trainer.killed FOLDER CORPUS KIND SEED` prints how many processes were killed on the way.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

import torch

from tests.trainer import tiny

OPTIONS = {
    "trainer.max_steps": 10,
    "trainer.checkpoint_every": 1,
    "trainer.keep_checkpoints": 2,
    "trainer.log_every": 4,
    "trainer.evaluate_every": 3,
    "trainer.evaluate_first": True,
}
MOST_KILLS = 4


def train(folder: Path, corpus: Path, kind: str, kill_after: float = 0.0) -> tuple[bool, float]:
    """Train to the end, from the newest checkpoint on, in a process of its own. Returns whether it was killed, and how
    many seconds it computed.

    The kernel kills it as by SIGKILL, without a word to Python, once it has computed for `kill_after` seconds (0:
    never). Seconds of work, unlike those of a clock, do not depend on what else the machine does.
    """
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, kill_after)
        tiny.run(folder, corpus, tiny.KINDS[kind] | OPTIONS | {"resume": "auto"})
        os._exit(0)
    _, status, usage = os.wait4(process, 0)
    assert status in (0, signal.SIGPROF), f"the run failed with status {status}"
    return status != 0, usage.ru_utime + usage.ru_stime


def main(folder: Path, corpus: Path, kind: str, seed: int) -> int:
    """Returns the number of kills."""
    torch.set_num_threads(1)
    # What is made on first use is there when the processes part; the second run then tells how long one takes.
    tiny.run(folder.with_name("first"), corpus, tiny.KINDS[kind] | OPTIONS)
    _, duration = train(folder.with_name("whole"), corpus, kind)
    delays = random.Random(seed)
    for kills in range(MOST_KILLS):
        was_killed, _ = train(folder, corpus, kind, kill_after=delays.uniform(0.1, 0.7) * duration)
        if not was_killed:
            return kills
    train(folder, corpus, kind)
    return MOST_KILLS


if __name__ == "__main__":
    sys.stdout.write(f"{main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))}\n")
