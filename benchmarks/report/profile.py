"""The seconds in which `kitforge profile` reads the traces of 1,000 ranks, and names the slow one.

Run from the checkout: `python -m benchmarks.report.profile [--ranks 1000]`; it writes benchmarks/report/profile.md. The
bound is a minute. A rank has three steps of 2,000 kernels and 150 collectives, of a group of eight and a tenth of all
ranks; its clock is up to five seconds off, and one rank computes 50 ms longer.
"""

import random
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.command_line import CommandLine, write_result
from kitforge.foundation.device import describe, pick
from kitforge.report.profile_page import findings, profile_page
from kitforge.report.rank_trace import Collective, RankTrace, read_traces
from kitforge.report.step_times import step_times

TABLE = Path(__file__).with_suffix(".md")
BOUND = 60.0
NUM_STEPS, NUM_KERNELS, NUM_COLLECTIVES, GROUP = 3, 2000, 150, 8
MS = 1_000_000
SMOKE = {"NUM_KERNELS": 20, "NUM_COLLECTIVES": 4, "ranks": 16}


def trace(rank: int, ranks: int, slow: int, offset: int) -> RankTrace:
    """Each collective follows some kernels, of which those of the slow rank take longer."""
    steps, compute, collectives = [], list[int](), list[Collective]()
    now, work = offset, 100_000 * np.arange(1, NUM_KERNELS // NUM_COLLECTIVES + 1)
    for step in range(1, NUM_STEPS + 1):
        start = now
        for call in range(NUM_COLLECTIVES):
            of_all = call % 10 == 0
            late = 50 * MS // len(range(0, NUM_COLLECTIVES, 10)) if of_all else 0
            first = now + (late if rank == slow else 0)
            compute += [now, first]
            compute += np.stack([first + work - 100_000, first + work - 10_000], axis=1).ravel().tolist()
            arrival, end = first + int(work[-1]), now + late + int(work[-1]) + MS // 10
            size, group = (ranks, "0@0") if of_all else (GROUP, f"1@{rank // GROUP * GROUP}")
            collectives.append(Collective(group, size, "allreduce", 10_000, arrival, end))
            now = end
        now += MS
        steps.append((step, start, now))
    return RankTrace(
        run="one",
        rank=rank,
        num_ranks=ranks,
        peak_memory=2**30,
        steps=steps,
        compute=np.array(compute, dtype=np.int64).reshape(-1, 2),
        data=np.zeros((0, 2), dtype=np.int64),
        collectives=collectives,
    )


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--ranks", type=int, default=1000)
    ranks = parser.parse(SMOKE, globals()).ranks
    generator, slow = random.Random(1), ranks // 3
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for rank in range(ranks):
            offset = generator.randint(-5000, 5000) * MS
            trace(rank, ranks, slow, offset).write(folder / "profile")
        size = sum(each.stat().st_size for each in (folder / "profile").iterdir())
        marks = [time.perf_counter()]
        traces = read_traces(folder)
        marks.append(time.perf_counter())
        times = step_times(traces)
        marks.append(time.perf_counter())
        found, page = findings(times), profile_page(times, "run")
        marks.append(time.perf_counter())
    assert found[0].startswith(f"rank {slow} works 50.0 ms"), found
    seconds = [later - before for before, later in zip(marks, marks[1:], strict=False)]
    parts = zip(("read", "align and sum", "words and page"), seconds, strict=True)
    words = f"""# Profiles of many ranks

{ranks:,} ranks, {size / 2**20:,.0f} MiB of traces, on one thread of {describe(pick("cpu"))}. The bound is \
{BOUND:.0f} s; this took {sum(seconds):.0f} s. The page has {len(page) / 2**20:.1f} MiB.

| part | seconds |
|---|---|
{"".join(f"| {part} | {each:.1f} |" + chr(10) for part, each in parts)}
It said: {found[0]}
"""
    write_result(TABLE, words)


if __name__ == "__main__":
    main()
