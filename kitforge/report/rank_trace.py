"""What a rank keeps of its traced steps, in nanoseconds of its own clock: computation, data loading and collectives.

It is reduced from the Chrome trace that torch's profiler exports: kernels of streams with NCCL's among them, or the
operators of the host with gloo's collectives. It knows neither torch nor the other ranks.
"""

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json

# [spans, 2]: nanoseconds at which each begins and ends.
Spans = NDArray[np.int64]
FOLDER = "profile"
# The spans that the trainer records: the end of a step and its number, the loading of a batch, and a message between
# two ranks with its number of elements.
STEP, DATA, MESSAGE = "kitforge step ", "kitforge data", "kitforge message "


class Collective(NamedTuple):
    """A collective, or a message between two ranks, as one rank saw it: from its arrival to its end."""

    group: str  # a name that all its ranks have; empty if the trace does not tell it
    num_ranks: int
    kind: str
    num_elements: int
    start: int
    end: int


class RankTrace(NamedTuple):
    """The traced steps of a rank."""

    run: str
    rank: int
    num_ranks: int
    peak_memory: int  # bytes
    steps: Sequence[tuple[int, int, int]]  # number, start and end; the first is warm-up
    compute: Spans  # disjoint, in order
    data: Spans
    collectives: Sequence[Collective]  # by their start

    def write(self, folder: Path) -> None:
        """Write the trace into `folder`, under the number of its rank."""
        spans = {name: np.diff(getattr(self, name).ravel(), prepend=0).tolist() for name in ("compute", "data")}
        text = json.dumps(self._asdict() | spans, separators=(",", ":"))
        write_text(folder / f"rank-{self.rank:05d}.json", text)


def read_traces(folder: Path, *, partial: bool = False) -> list[RankTrace]:
    """The traces of a run by rank; with `partial`, of the ranks whose files are there and whole. Raises DataError."""
    found = list[RankTrace]()
    for path in sorted((folder / FOLDER).glob("rank-*.json")):
        try:
            row = parse_json(path.read_bytes())
            row |= {name: np.cumsum(row[name], dtype=np.int64).reshape(-1, 2) for name in ("compute", "data")}
            found.append(RankTrace(**row | {"collectives": [Collective(*each) for each in row["collectives"]]}))
        except (OSError, ValueError, TypeError, KeyError) as error:
            if not partial:
                fix = "copy it again, or profile again; partial=true leaves it out"
                raise DataError(f"{path} is cut off or damaged", got=error, expected="a trace", fix=fix) from error
    if not found:
        got = f"no {FOLDER}/rank-*.json" if folder.is_dir() else "no such folder; look into runs/, or try runs/latest"
        fix = "train with trainer.profile=true, beyond trainer.profile_steps"
        raise DataError(f"{folder} was not profiled", got=got, expected="a file of each rank", fix=fix)
    runs = {trace.run: f"rank {trace.rank} of run {trace.run}" for trace in found}
    if len(runs) > 1:
        got, fix = ", ".join([*runs.values()][:4]), f"delete the older files of {folder / FOLDER}"
        raise DataError("the traces are of several runs", got=got, expected="those of one", fix=fix)
    missing = sorted({*range(found[0].num_ranks)} - {trace.rank for trace in found})
    if missing and not partial:
        got, fix = f"none of rank {', '.join(map(str, missing[:8]))}", "copy them here; partial=true goes without"
        raise DataError("traces are missing", got=got, expected=f"{found[0].num_ranks:,} ranks", fix=fix)
    return found


def union(spans: Spans) -> Spans:
    """The disjoint spans, in order, that cover what `spans` cover."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    opens = np.append(True, spans[1:, 0] > reach[:-1])[: len(spans)]
    return np.column_stack([spans[opens, 0], reach[np.append(opens[1:], True)[: len(spans)]]])


def reduce_trace(trace: Mapping[str, Any], flights: Sequence[Mapping[str, Any]], **further: Any) -> RankTrace:
    """The trace of a rank from a Chrome trace with at least one end of a step, and what torch's flight recorder noted
    of gloo's collectives; `further` are the fields that no trace holds."""
    events = sorted((event for event in trace["traceEvents"] if event.get("ph") == "X"), key=lambda event: event["ts"])
    first = next(event["ts"] for event in events if event["name"].startswith(STEP))
    for event in events:
        event["start"] = round(1000 * (event["ts"] - first))
        event["end"] = event["start"] + round(1000 * event["dur"])
    # Spans of the host have a copy on the device.
    host = [event for event in events if event["cat"] == "user_annotation"]
    ends = [(int(event["name"][len(STEP) :]), event["start"]) for event in host if event["name"].startswith(STEP)]
    data = union(_spans(event for event in host if event["name"] == DATA))
    # Groups that are made together share a name; torch leaves out the ranks of a group of all of them.
    groups = {
        each["pg_name"]: (f"{each['pg_name']}@{[*each['ranks'], 0][0]}", int(each["pg_size"]))
        for each in trace.get("distributedInfo", {}).get("pg_config", ())
    }
    device = [event for event in events if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]

    work = [event for event in device if not event["name"].startswith("nccl")] if device else _host_work(events, data)
    found = []
    for event in (event for event in device if event["name"].startswith("nccl")):
        noted = event.get("args", {})
        group, kind = noted.get("Process Group Name", ""), _kind(noted.get("Collective name", event["name"]))
        size = int(noted.get("In msg nelems", 0))
        found.append(Collective(*groups.get(group, ("", 0)), kind, size, event["start"], event["end"]))
    found += _of_gloo(host, flights, groups)
    return RankTrace(
        steps=[(number, start, end) for (_, start), (number, end) in zip(ends, ends[1:], strict=False)],
        compute=union(_spans(work)),
        data=data,
        collectives=sorted(found, key=lambda each: each.start),
        **further,
    )


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    return np.array([(event["start"], event["end"]) for event in events], dtype=np.int64).reshape(-1, 2)


def _of_gloo(
    host: Sequence[Mapping[str, Any]], flights: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, int]]
) -> list[Collective]:
    """The collectives of gloo. Their spans have neither group nor size. Those of a message are in the span around it;
    those of the others in the flight recorder, in the order of each group, whose threads serve no other."""
    spans = [event for event in host if event["name"].startswith("gloo:")]
    noted, of_group = dict[str, list[Collective]](), dict[tuple[str, str], list[Collective]]()
    for flight in flights:
        group, size = groups.get(flight["process_group"][0], ("", 0)), sum(map(prod, flight["input_sizes"]))
        name, row = flight["profiling_name"], Collective(*group, _kind(flight["profiling_name"]), size, 0, 0)
        noted.setdefault(name, []).append(row)
        of_group.setdefault((name, row.group), []).append(row)
    # Backwards, as the recorder has what went before the trace too, and of a long trace its end alone.
    votes = dict[int, Counter[str]]()
    for name, rows in noted.items():
        called = (event for event in reversed(spans) if event["name"] == name)
        for event, row in zip(called, reversed(rows), strict=False):
            votes.setdefault(event["tid"], Counter())[row.group] += 1
    owners = {tid: counts.most_common(1)[0][0] for tid, counts in votes.items()}
    messages = [event for event in host if event["name"].startswith(MESSAGE)]
    starts, found = [event["start"] for event in messages], list[Collective]()
    for event in reversed(spans):
        kind, start, end = _kind(event["name"]), event["start"], event["end"]
        index = bisect_right(starts, start) - 1
        left = of_group.get((event["name"], owners.get(event["tid"], "")))
        if kind == "message" and index >= 0 and start <= messages[index]["end"]:
            ranks, size = messages[index]["name"][len(MESSAGE) :].split()
            known = Collective(ranks, 2, kind, int(size), 0, 0)
        else:
            known = left.pop() if left else Collective("", 0, kind, 0, 0, 0)
        found.append(known._replace(start=start, end=end))
    return found


def _kind(name: str) -> str:
    """One name for a collective of both backends: allreduce, allgather, message."""
    letters = name.removeprefix("gloo:").replace("_", "").lower().removesuffix("base")
    return "message" if letters.startswith(("send", "recv")) else letters


def _host_work(events: Sequence[Mapping[str, Any]], data: Spans) -> list[Mapping[str, Any]]:
    """The operators that the host computes itself: without those that communicate, those around them, whose time is
    partly a wait, and those that make a batch."""
    operators = [event for event in events if event["cat"] == "cpu_op" and "::" in event["name"]]
    calls: dict[Any, list[int]] = {}
    for event in operators:
        if event["name"].startswith(("c10d", "_c10d")):
            calls.setdefault(event["tid"], []).append(event["start"])
    opens, ends = data[:, 0].tolist(), [-1, *data[:, 1].tolist()]

    def is_work(event: Mapping[str, Any]) -> bool:
        starts, start = calls.get(event["tid"], []), event["start"]
        communicates = bisect_right(starts, event["end"]) > bisect_left(starts, start)
        return not (communicates or start < ends[bisect_right(opens, start)] or event["name"].startswith("autograd::"))

    return [event for event in operators if is_work(event)]
