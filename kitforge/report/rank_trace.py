"""What a rank keeps of its traced steps, in nanoseconds of its own clock: computation, data loading and collectives.

It is reduced from the Chrome trace that torch's profiler exports: kernels of streams, NCCL's among them, or operators of
the host with gloo's collectives. It knows neither torch nor the other ranks.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
# Names of the spans that the trainer records: the end of a step with its number, and the loading of a batch.
STEP, DATA = "kitforge step ", "kitforge data"
# And around a message of two ranks: its sender, receiver and bytes, which gloo does not tell.
MESSAGE = "kitforge message "
_COMMUNICATION = ("c10d", "_c10d_functional")
_ITEM_BYTES = {"Double": 8, "Long": 8, "Half": 2, "BFloat16": 2, "Short": 2, "Byte": 1, "Char": 1, "Bool": 1}


class Collective(NamedTuple):
    """A collective, or a message of two ranks, as one rank saw it: from its arrival to its end."""

    group: str  # its name on all its ranks; empty if the trace does not tell it
    num_ranks: int
    kind: str
    num_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """The traced steps of one rank. Times count from `origin`."""

    run: str
    rank: int
    num_ranks: int
    peak_memory: int  # bytes
    origin: int  # nanoseconds
    steps: Sequence[tuple[int, int, int]]  # number, start and end; the first is warm-up
    compute: Spans  # disjoint, in order
    data: Spans
    collectives: Sequence[Collective]  # by their start

    def write(self, folder: Path) -> None:
        """Write the trace into `folder`, under the number of its rank."""
        compute, data = (np.diff(each.ravel(), prepend=0).tolist() for each in (self.compute, self.data))
        text = json.dumps(asdict(self) | {"compute": compute, "data": data}, separators=(",", ":"))
        write_text(folder / f"rank-{self.rank:05d}.json", text)


def read_traces(folder: Path, *, partial: bool = False) -> list[RankTrace]:
    """The traces of a run by rank; with `partial`, of the ranks whose files are there and whole. Raises DataError."""
    paths = sorted((folder / FOLDER).glob("rank-*.json"))
    if not paths:
        fix = "train with trainer.profile=true, for longer than trainer.profile_steps says"
        raise DataError(f"{folder} was not profiled", got=f"no {FOLDER}/rank-*.json", expected="one a rank", fix=fix)
    found = [trace for path in paths if (trace := _read(path, partial)) is not None]
    runs = {trace.run: trace for trace in found}
    if len(runs) > 1:
        ranks = "; ".join(f"{run}: rank {trace.rank}" for run, trace in list(runs.items())[:4])
        fix = f"delete the older files in {folder / FOLDER}"
        raise DataError("the traces are of several runs", got=ranks, expected="those of one", fix=fix)
    here = {trace.rank for trace in found}
    missing = [str(rank) for rank in range(found[0].num_ranks if found else 1) if rank not in here]
    if missing and not (partial and found):
        got, fix = f"none of rank {', '.join(missing[:8])}", "copy it from its machine, or add partial=true"
        raise DataError("traces are missing", got=got, expected=f"{len(missing) + len(here)} ranks", fix=fix)
    return found


def _read(path: Path, partial: bool) -> RankTrace | None:
    try:
        row = parse_json(path.read_bytes())
        row |= {name: np.cumsum(row[name], dtype=np.int64).reshape(-1, 2) for name in ("compute", "data")}
        return RankTrace(**row | {"collectives": [Collective(*each) for each in row["collectives"]]})
    except (OSError, ValueError, TypeError, KeyError) as error:
        if partial:
            return None
        fix = "copy it again or profile again; partial=true leaves it out"
        raise DataError(f"{path} is cut off or damaged", got=error, expected="a whole trace", fix=fix) from error


def union(spans: Spans) -> Spans:
    """The disjoint spans, in order, that cover what `spans` cover."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(spans):
        return spans
    reach = np.maximum.accumulate(spans[:, 1])
    opens = np.append(True, spans[1:, 0] > reach[:-1])
    return np.column_stack([spans[opens, 0], reach[np.append(opens[1:], True)]])


def reduce_trace(trace: Mapping[str, Any], flights: Sequence[Mapping[str, Any]], **further: Any) -> RankTrace:
    """The trace of a rank from a Chrome trace with at least one end of a step, and what torch's flight recorder noted of
    gloo's collectives; `further` are the fields that no trace holds."""
    events = sorted((each for each in trace["traceEvents"] if each.get("ph") == "X"), key=lambda each: float(each["ts"]))
    first = next(event["ts"] for event in events if event["name"].startswith(STEP))
    for event in events:
        event["start"] = round(1000 * (event["ts"] - first))
        event["end"] = event["start"] + round(1000 * event["dur"])
    # Spans of the host have a copy on the device.
    host = [event for event in events if event.get("cat") == "user_annotation"]
    ends = [(int(event["name"][len(STEP) :]), event["start"]) for event in host if event["name"].startswith(STEP)]
    data = union(_spans(event for event in host if event["name"] == DATA))
    config = trace.get("distributedInfo", {}).get("pg_config", ())
    # Groups that are made together share a name; torch leaves out the ranks of a group of all of them.
    groups = {each["pg_name"]: (f"{each['pg_name']}@{[*each['ranks'], 0][0]}", int(each["pg_size"])) for each in config}
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = [_of_nccl(event, groups) for event in kernels if _is_nccl(event)]
    found += _of_gloo(host, [each for each in flights if each["process_group"][0] in groups], groups)
    work = [event for event in kernels if not _is_nccl(event)] if kernels else _host_work(events, data)
    return RankTrace(
        steps=[(number, start, end) for (_, start), (number, end) in zip(ends, ends[1:], strict=False)],
        origin=int(trace.get("baseTimeNanoseconds", 0)) + round(1000 * first),
        compute=union(_spans(work)),
        data=data,
        collectives=sorted(found, key=lambda each: each.start),
        **further,
    )


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    return np.array([(event["start"], event["end"]) for event in events], dtype=np.int64).reshape(-1, 2)


def _is_nccl(event: Mapping[str, Any]) -> bool:
    return event["name"].startswith("nccl") or "Collective name" in event.get("args", {})


def _of_nccl(event: Mapping[str, Any], groups: Mapping[str, tuple[str, int]]) -> Collective:
    found = event.get("args", {})
    group, size = groups.get(found.get("Process Group Name"), ("", 0))
    num_bytes = int(found.get("In msg nelems", 0)) * _ITEM_BYTES.get(found.get("dtype"), 4)
    kind = _kind(str(found.get("Collective name", event["name"])))
    return Collective(group, size, kind, num_bytes, event["start"], event["end"])


def _of_gloo(
    host: Sequence[Mapping[str, Any]], flights: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[str, int]]
) -> Iterator[Collective]:
    """The collectives of gloo. Their spans have neither group nor size: those of a message are in the span around it,
    those of the others in the flight recorder, in the order of their start."""
    messages = [event for event in host if event["name"].startswith(MESSAGE)]
    starts = [event["start"] for event in messages]
    noted: dict[str, list[Mapping[str, Any]]] = {}
    for each in flights:
        noted.setdefault(each["profiling_name"], []).append(each)
    # From the last one back, as the recorder keeps a limited number, and notes what went before the trace.
    for event in reversed([event for event in host if event["name"].startswith("gloo:")]):
        name, start, end = event["name"], event["start"], event["end"]
        around = messages[bisect_right(starts, start) - 1] if starts else {"start": 0, "end": -1}
        if around["start"] <= start <= around["end"]:
            ranks, num_bytes = around["name"][len(MESSAGE) :].split()
            yield Collective(ranks, 2, "message", int(num_bytes), start, end)
        elif noted.get(name):
            flight = noted[name].pop()
            group, size = groups[flight["process_group"][0]]
            kinds = zip(flight["input_sizes"], flight["input_dtypes"], strict=False)
            num_bytes = sum(prod(shape) * _ITEM_BYTES.get(kind, 4) for shape, kind in kinds)
            yield Collective(group, size, _kind(name), num_bytes, start, end)
        else:
            yield Collective("", 0, _kind(name), 0, start, end)


def _kind(name: str) -> str:
    """One name for a collective of both backends: allreduce, allgather, send."""
    letters = name.removeprefix("gloo:").replace("_", "").lower()
    return "message" if letters in ("send", "recv", "recvanysource") else letters.removesuffix("base")


def _host_work(events: Sequence[Mapping[str, Any]], data: Spans) -> list[Mapping[str, Any]]:
    """The operators that the host computes itself: without those that communicate, those around them, whose time is
    partly a wait, and those that make a batch."""
    operators = [event for event in events if event.get("cat") == "cpu_op" and "::" in event["name"]]
    calls: dict[Any, list[int]] = {}
    for event in operators:
        if event["name"].startswith(_COMMUNICATION):
            calls.setdefault(event["tid"], []).append(event["start"])
    opens, ends = data[:, 0].tolist(), [-1, *data[:, 1].tolist()]

    def is_work(event: Mapping[str, Any]) -> bool:
        starts = calls.get(event["tid"], [])
        communicates = bisect_right(starts, event["end"]) > bisect_left(starts, event["start"])
        is_data = event["start"] < ends[bisect_right(opens, event["start"])]
        return not (communicates or is_data or event["name"].startswith("autograd::"))

    return [event for event in operators if is_work(event)]
