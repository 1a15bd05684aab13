"""Four ranks on gloo, one of which sleeps: the profile says which, for how long, and where."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.world import World
from kitforge.report.profile_page import findings, work_excess
from kitforge.report.rank_trace import read_traces
from kitforge.report.step_times import COMPUTE, DATA, HOST, WAITING, step_times
from kitforge.trainer.callbacks.callback import Event
from kitforge.trainer.callbacks.profiler import Profiler, loading
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.slow
# So much longer than the work of a step that ranks which are not let run do not hide it.
ASLEEP, SLEEP = 2, 0.4


def profiled(rank: int, folder: Path, part: str) -> list[float]:
    """Train on nothing for six steps, of which 3 to 6 are traced; the seconds of each step that this rank slept."""
    context: Any = SimpleNamespace(
        world=World.of_process_group(ParallelConfig(data=2, shard=2), torch.device("cpu")),
        state=SimpleNamespace(cursor=SimpleNamespace(step=0)),
    )
    profiler, slept = Profiler(folder / "profile", (3, 6)), list[float]()
    matrix = torch.randn(200, 200, requires_grad=True)

    def sleep(here: str) -> None:
        if rank == ASLEEP and here == part:
            started = time.perf_counter()
            time.sleep(SLEEP)
            slept.append(time.perf_counter() - started)

    def batches() -> Any:
        for _ in range(6):
            sleep("data")
            yield torch.ones(200)

    profiler.on_event(Event(kind="start"), context)
    for batch in loading(batches()):
        (matrix @ batch).sum().backward()  # type: ignore[no-untyped-call]
        sleep("host")
        work = collectives.start_all_reduce_(matrix.grad, context.world.mesh.replicas)
        if rank == 0:
            collectives.start_send(batch, 1, dist.group.WORLD).wait()
        if rank == 1:
            collectives.receive_(batch, 0)
        work.wait()
        collectives.all_reduce_(batch, context.world.all_ranks)
        context.state.cursor.step += 1
        profiler.on_event(Event(kind="step"), context)
    return slept


@pytest.mark.parametrize(("part", "cause"), [("data", DATA), ("host", HOST)])
def test_the_rank_that_sleeps_is_named_with_its_sleep(tmp_path: Path, part: str, cause: int) -> None:
    slept = run_ranks(4, profiled, tmp_path, part)[ASLEEP]
    traces = read_traces(tmp_path)
    times = step_times(traces)
    found = next(each for each in findings(times) if each.startswith("rank"))
    assert found.startswith(f"rank {ASLEEP} works ") and {DATA: "loading data", HOST: "on its host"}[cause] in found
    assert times.steps == [4, 5, 6] and times.num_unmatched == 0
    planted = float(np.median(slept[3:])) * 1e9
    # What the others do in a step, which the machine may stretch, bounds how far off the figure can be.
    noise = float(np.median(np.delete(times.causes, ASLEEP, axis=0)[:, :, [COMPUTE, DATA, HOST]].sum(axis=2)))
    assert abs(float(np.median(work_excess(times)[ASLEEP])) - planted) < 0.1 * planted + noise
    waits = np.median(times.causes[:, :, WAITING], axis=1)
    assert min(np.delete(waits, ASLEEP)) > planted / 2 > waits[ASLEEP]
    assert {each.kind for each in traces[1].collectives} == {"allreduce", "message"}
