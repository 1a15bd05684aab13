"""A rank of the launch tests: it meets the others and then does, if it is rank 1, what its argument says."""

import os
import signal
import sys
import time
from pathlib import Path

from kitforge.core.parallel import rank_errors
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rank_errors import report_error
from kitforge.core.parallel.rendezvous import Rendezvous, launch_info
from kitforge.foundation.errors import DataError

TIMEOUT = 5.0


def main(deed: str) -> int:
    where = launch_info()
    assert where is not None
    # Ranks look more often at each other.
    rank_errors.LOOK = 0.05
    sys.stdout.write(f"rank {where.rank} speaks\n")
    sys.stderr.write(f"rank {where.rank} complains\n")
    # The timeout counts from when both have imported torch, which takes longer than it on a busy machine.
    here, other = (Path(f"started-{where.restarts}-{rank}") for rank in (where.rank, 1 - where.rank))
    here.touch()
    while not other.exists():
        time.sleep(0.05)
    is_second = where.rank == 1
    if is_second and deed == "die once" and where.restarts == 0:
        # Late enough for the other to be in the lobby, whose keys it leaves behind there.
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    with Rendezvous.open(ParallelConfig(shard=2, timeout=TIMEOUT), "cpu") as lobby:
        with lobby.local_rank_zero_first():
            Path(f"turn-{where.rank}").write_text(str(time.monotonic()))
            time.sleep(0.2)
        world = lobby.init_process_group()
        lobby.check_same({"data": str(where.rank) if deed == "differ" else "alike"})
        if deed == "wait for a signal":
            return stop_together(world)
        if is_second:
            misbehave(deed)
        for _ in range(3):
            world.all_gather_object(None)
        sys.stdout.write(f"ended in round {where.restarts}, {os.environ['OMP_NUM_THREADS']} threads\n")
    return 0


def misbehave(deed: str) -> None:
    Path("since").write_text(str(time.monotonic()))
    if deed == "raise":
        raise DataError("a bad row", got="row 7", fix="mend it")
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "hang":
        # As in the training loop, a request to end waits for the end of the step, which never comes.
        signal.signal(signal.SIGTERM, lambda *_: None)
        while True:
            time.sleep(1)


def stop_together(world: object) -> int:
    received: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    Path(f"ready-{os.environ['RANK']}").touch()
    while not world.any(bool(received)):  # type: ignore[attr-defined]
        time.sleep(0.05)
    time.sleep(0.5)
    Path(f"saved-{os.environ['RANK']}").write_text(str(len(received)))
    return 130


if __name__ == "__main__":
    sys.excepthook = lambda _kind, error, _trace: report_error(error, str(error)) and None
    sys.exit(main(sys.argv[1]))
