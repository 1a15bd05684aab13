"""A run that is killed again and again, at random instants, until it has reached its end."""

import os
import random
import shutil
import signal
import traceback
from pathlib import Path

from tests.trainer import tiny

OPTIONS = {
    "trainer.max_steps": 10,
    "trainer.checkpoint_every": 1,
    "trainer.save_total_limit": 2,
    "trainer.log_every": 4,
    "trainer.eval_every": 3,
    "trainer.eval_first": True,
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
        try:
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, kill_after)
            tiny.run(folder, corpus, tiny.KINDS[kind] | OPTIONS | {"resume": "auto"})
            os._exit(0)
        except BaseException:  # noqa: BLE001 (nothing of the child may go on in its parent's place)
            traceback.print_exc()
            os._exit(1)
    _, status, usage = os.wait4(process, 0)
    assert status in (0, signal.SIGPROF), f"the run failed with status {status}"
    return status != 0, usage.ru_utime + usage.ru_stime


def kill_again_and_again(folder: Path, corpus: Path, kind: str, seed: int) -> int:
    """Leaves the run in `folder` and one that nobody killed beside it, in `whole`; returns the number of kills."""
    # What is made on first use is there when the processes part; the second run then tells how long one takes.
    tiny.run(folder.with_name("first"), corpus, tiny.KINDS[kind] | OPTIONS)
    _, duration = train(folder.with_name("whole"), corpus, kind)
    delays = random.Random(seed)
    kills = 0
    while kills < MOST_KILLS:
        was_killed, seconds = train(folder, corpus, kind, kill_after=delays.uniform(0.1, 0.7) * duration)
        if not was_killed and kills:
            return kills
        if not was_killed:
            # It was quicker than the one that told how long it takes.
            duration = seconds
            shutil.rmtree(folder)
        kills += was_killed
    train(folder, corpus, kind)
    return MOST_KILLS
