"""Traces of ranks as a profiler would leave them: planned ones, whose answer is known, and drawn ones."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kitforge.report.rank_trace import DATA, STEP, Collective, RankTrace, Spans, union

MS = 1_000_000


def trace_of(rank: int, num_ranks: int, **fields: Any) -> RankTrace:
    """A trace whose spans are lists; of no computation and no data, unless they are given."""
    spans = {name: as_spans(fields.pop(name, ())) for name in ("compute", "data")}
    return RankTrace(**{"run": "one", "rank": rank, "num_ranks": num_ranks, "peak_memory": 2**30, **spans, **fields})


def as_spans(found: Sequence[tuple[int, int]]) -> Spans:
    return union(np.array(found, dtype=np.int64).reshape(-1, 2))


def planned(
    num_ranks: int,
    *,
    groups: Sequence[Sequence[int]] = (),
    extra: Mapping[tuple[int, str], int] | None = None,
    transfer: Mapping[int, int] | None = None,
    offsets: Sequence[int] | None = None,
    num_steps: int = 4,
    warm_up: int = 0,
) -> list[RankTrace]:
    """Steps of 10 ms of data, 40 ms of computation, 5 ms on the host and a collective of each group of the rank and of
    all ranks, which lasts 2 ms or what `transfer` says of its group. `extra` milliseconds are a rank's in a part, and
    `warm_up` those of rank 0 in the first step. `offsets` are added to the clocks."""
    meets = [*groups, range(num_ranks)]
    clocks = [0] * num_ranks
    steps: list[list[tuple[int, int, int]]] = [[] for _ in clocks]
    spans: dict[str, list[list[tuple[int, int]]]] = {part: [[] for _ in clocks] for part in ("data", "compute")}
    met: list[list[Collective]] = [[] for _ in clocks]
    for step in range(1, num_steps + 1):
        begins = list(clocks)
        for rank in range(num_ranks):
            for part, length in (("data", 10), ("compute", 40), ("host", 5)):
                more = (extra or {}).get((rank, part), 0) + (warm_up if (rank, step, part) == (0, 1, "host") else 0)
                start, clocks[rank] = clocks[rank], clocks[rank] + (length + more) * MS
                if part in spans:
                    spans[part][rank].append((start, clocks[rank]))
        for number, members in enumerate(meets):
            end = max(clocks[rank] for rank in members) + (transfer or {}).get(number, 2) * MS
            for rank in members:
                met[rank].append(Collective(f"{number}@0", len(members), "allreduce", 1000, clocks[rank], end))
                clocks[rank] = end
        for rank in range(num_ranks):
            steps[rank].append((step, begins[rank], clocks[rank]))
    found = [
        trace_of(
            rank, num_ranks, steps=steps[rank], collectives=met[rank], **{name: spans[name][rank] for name in spans}
        )
        for rank in range(num_ranks)
    ]
    return [moved(each, 0 if offsets is None else offsets[each.rank]) for each in found]


def moved(trace: RankTrace, offset: int) -> RankTrace:
    """The same trace by a clock that is `offset` nanoseconds ahead."""
    return trace._replace(
        steps=[(number, start + offset, end + offset) for number, start, end in trace.steps],
        compute=trace.compute + offset,
        data=trace.data + offset,
        collectives=[each._replace(start=each.start + offset, end=each.end + offset) for each in trace.collectives],
    )


def drawn(generator: random.Random) -> list[RankTrace]:
    """Ranks whose computation, data and collectives overlap as they like, on one clock; a step is about 100 ns."""
    num_ranks, num_steps = generator.randint(1, 4), generator.randint(2, 3)
    marks = [[100 * step + generator.randint(0, 4) for step in range(num_steps + 1)] for _ in range(num_ranks)]
    met: list[list[Collective]] = [[] for _ in marks]
    for step in range(num_steps):
        count = generator.randint(1, 4)
        starts = [sorted(generator.sample(range(100 * step + 5, 100 * step + 90), count)) for _ in marks]
        for number in range(count if num_ranks > 1 else 0):
            last = max(row[number] for row in starts)
            kind = generator.choice(["allreduce", "allgather", "broadcast"]) if number else "allreduce"
            end = last + generator.randint(0, 20)
            for rank, row in enumerate(starts):
                own = end if kind != "broadcast" else max(row[number], end - generator.randint(0, 30))
                met[rank].append(Collective("0@0", num_ranks, kind, 8, row[number], own))

    def spans() -> list[tuple[int, int]]:
        starts = [generator.randint(0, 100 * num_steps) for _ in range(generator.randint(0, 12))]
        return [(start, start + generator.randint(0, 25)) for start in starts]

    return [
        trace_of(
            rank,
            num_ranks,
            steps=[(number + 1, own[number], own[number + 1]) for number in range(num_steps)],
            compute=spans(),
            data=spans(),
            collectives=met[rank],
        )
        for rank, own in enumerate(marks)
    ]


def chrome_trace(trace: RankTrace, backend: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """`trace` as torch's profiler exports it for gloo on a CPU or NCCL on a CUDA device, and the flight recorder's
    entries; with what a reader has to leave out: spans around others, copies on the device, and older entries."""
    events: list[dict[str, Any]] = []

    def add(name: str, category: str, start: int, end: int, tid: int = 1, **args: Any) -> None:
        times = {"ts": (start + 5_000_000_000) / 1000, "dur": (end - start) / 1000}
        events.append({"ph": "X", "name": name, "cat": category, "pid": 1, "tid": tid, "args": args, **times})

    is_nccl = backend == "nccl"
    for number, time in [(trace.steps[0][0] - 1, trace.steps[0][1]), *((each[0], each[2]) for each in trace.steps)]:
        add(f"{STEP}{number}", "user_annotation", time, time)
        add(f"{STEP}{number}", "gpu_user_annotation", time + 7, time + 9)
    for start, end in trace.data.tolist():
        add(DATA, "user_annotation", start, end)
        add("aten::stack", "cpu_op", start, end)
    for start, end in trace.compute.tolist():
        add("void gemm<float>(...)" if is_nccl else "aten::mm", "kernel" if is_nccl else "cpu_op", start, end, tid=7)
        add("aten::linear" if is_nccl else "autograd::engine::evaluate_function: MmBackward0", "cpu_op", start, end + 3)
    flights = [{"profiling_name": "gloo:all_reduce", "process_group": ["9", ""], "input_sizes": [[3]]}]
    for number, each in enumerate(trace.collectives):
        group = each.group.partition("@")[0]
        if is_nccl:
            args = {"Collective name": "allreduce", "In msg nelems": each.num_elements, "Process Group Name": group}
            add("ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)", "kernel", each.start, each.end, 20, **args)
            add("nccl:all_reduce", "gpu_user_annotation", each.start, each.end, 20)
        else:
            add("kitforge::reduced", "cpu_op", each.start - 2, each.end + 2, tid=9)
            add("c10d::allreduce_", "cpu_op", each.start - 1, each.start + 1, tid=9)
            add("gloo:all_reduce", "user_annotation", each.start, each.end, tid=30 + 2 * int(group) + number % 2)
            row = {"process_group": [group, ""], "input_sizes": [[each.num_elements // 4, 4]]}
            flights.append({"profiling_name": "gloo:all_reduce", **row})
    names = {each.group.partition("@"): each.num_ranks for each in trace.collectives}
    config = [{"pg_name": name, "pg_size": size, "ranks": [int(first)]} for (name, _, first), size in names.items()]
    random.Random(1).shuffle(events)
    metadata = {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}}
    return {"traceEvents": [metadata, *events], "distributedInfo": {"pg_config": config}}, flights
