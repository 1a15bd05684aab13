"""Where the time of traced steps went, on each rank by cause.

Clocks of machines differ, so they are aligned on the ends of collectives, which all ranks of a group leave together.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kitforge.foundation.errors import DataError
from kitforge.report.rank_trace import RankTrace, Spans, union

# Every instant of a step has the first of these that applies: the rank computes; a collective runs that all its ranks
# have reached (exposed communication); it waits for the last of them; its batch is loaded; none of them.
CAUSES = ("compute", "communication", "waiting", "data", "host")
COMPUTE, COMMUNICATION, WAITING, DATA, HOST = range(5)
# Which all ranks leave together; a broadcast does not wait for those that receive.
_JOINT = ("allreduce", "allgather", "reducescatter", "alltoall", "barrier")
Nanoseconds = NDArray[np.int64]


class Link(NamedTuple):
    """The collectives of one kind and size in a group."""

    excess: float  # nanoseconds of a step that they take longer than in the median group
    ranks: list[int]
    kind: str
    num_elements: int
    nanoseconds: float  # of one, from its last arrival, the median
    usual: float  # in the median group of as many ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The counted steps of all ranks: the first traced one is warm-up, and is not counted."""

    ranks: Sequence[int]
    steps: Sequence[int]
    causes: Nanoseconds  # [ranks, steps, causes], which sum to the step
    transfers: Nanoseconds  # [ranks, steps]: communication, hidden behind computation or not
    peak_memory: Nanoseconds  # [ranks], bytes
    links: Sequence[Link]  # of groups of which there are several, the slowest first
    num_unmatched: int  # collectives that were not traced on all their ranks


def step_times(traces: Sequence[RankTrace]) -> StepTimes:
    """The times of the steps that all `traces` have. Raises DataError if there are none behind the warm-up."""
    steps = sorted(set.intersection(*({number for number, *_ in trace.steps[1:]} for trace in traces)))
    if not steps:
        shortest, fix = min(traces, key=lambda trace: len(trace.steps)), "profile steps that the whole run reaches"
        got = f"{len(shortest.steps)} steps of rank {shortest.rank}"
        raise DataError("no step was traced on all ranks", got=got, expected="two, as the first is warm-up", fix=fix)
    ranks, meetings, cells, groups, starts, ends = _flat(traces)
    # Of the n-th collective of a step on each rank of a group: whether they are one, on all its ranks.
    met, size = np.bincount(meetings), np.zeros(groups.max(initial=0) + 1, dtype=np.int64)
    np.maximum.at(size, groups, met[meetings])
    is_whole = np.ones(cells.max(initial=0) + 1, dtype=bool)
    np.logical_and.at(is_whole, cells, (met[meetings] == size[groups]) & (size[groups] > 1))
    known = is_whole[cells]
    joint = np.array([each.kind in _JOINT for trace in traces for each in trace.collectives], dtype=bool)
    ahead = _aligned(len(traces), *(each[known & joint] for each in (ranks, meetings, groups, ends)))
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    last, left = np.full(len(met), least), np.full(len(met), most)
    np.maximum.at(last, meetings, starts - ahead[ranks])
    np.minimum.at(left, meetings, ends - ahead[ranks])
    arrivals = np.where(known, last[meetings] + ahead[ranks], starts)
    # One that ended before the last rank came has not waited for it.
    begins = np.where(joint | (arrivals <= ends), np.clip(arrivals, starts, ends), starts)
    # A message that was received is over, whenever its sender asks.
    is_message = np.array([each.kind == "message" for trace in traces for each in trace.collectives], dtype=bool)
    over = np.where(known & is_message, np.clip(left[meetings] + ahead[ranks], begins, ends), ends)
    spans = np.column_stack([starts, begins, over])
    found = [_counted(each, spans[ranks == index], steps) for index, each in enumerate(traces)]
    taken = np.where(known, np.maximum(left - last, 0)[meetings], -1)
    return StepTimes(
        ranks=[trace.rank for trace in traces],
        steps=steps,
        causes=np.stack([causes for causes, _ in found]),
        transfers=np.stack([transfers for _, transfers in found]),
        peak_memory=np.array([trace.peak_memory for trace in traces]),
        links=_links(traces, taken),
        num_unmatched=int((~known).sum()),
    )


def _counted(trace: RankTrace, spans: Nanoseconds, numbers: Sequence[int]) -> tuple[Nanoseconds, Nanoseconds]:
    """The causes of each step [steps, causes], and its communication with what computation hides [steps]; `spans` are
    arrival, that of the last rank and end [collectives, 3]."""
    steps = np.array([(start, end) for number, start, end in trace.steps if number in numbers], dtype=np.int64)
    transfer, wait = union(spans[:, 1:]), spans[:, :2]
    layers = [trace.compute, transfer, wait, trace.data]
    covered = [_covered(union(np.concatenate(layers[: number + 1])), steps) for number in range(len(layers))]
    totals = [np.zeros_like(covered[0]), *covered, steps[:, 1] - steps[:, 0]]
    return np.diff(np.stack(totals, axis=1)), _covered(transfer, steps)


def _covered(spans: Spans, steps: Spans) -> Nanoseconds:
    """The nanoseconds of each step [steps, 2] that the disjoint `spans` cover."""
    before = np.append(0, np.cumsum(spans[:, 1] - spans[:, 0]))
    index = np.searchsorted(spans[:, 0], steps, side="right")
    ends = np.append(np.iinfo(np.int64).min // 2, spans[:, 1])
    return np.diff(before[index] - np.maximum(ends[index] - steps, 0))[:, 0]


def _flat(traces: Sequence[RankTrace]) -> Nanoseconds:
    """Of the collectives of all ranks, in order: rank, meeting, step of a group, group, start and end [6, collectives].
    The n-th of a step is one meeting of all ranks of its group; what has no group meets nobody."""
    ids: tuple[dict[Any, int], ...] = ({}, {}, {})
    rows = []
    for index, trace in enumerate(traces):
        opens, counts = [start for _, start, _ in trace.steps], Counter[Any]()
        for number, each in enumerate(trace.collectives):
            step = bisect_right(opens, each.start)
            group = each.group if each.group and step else (index, number)
            cell = group, trace.steps[step - 1][0]
            counts[cell] += 1
            keys = zip(ids, ((*cell, counts[cell]), cell, group), strict=True)
            rows.append((index, *(known.setdefault(key, len(known)) for known, key in keys), each.start, each.end))
    return np.array(rows, dtype=np.int64).reshape(-1, 6).T


def _aligned(
    num_ranks: int, ranks: Nanoseconds, meetings: Nanoseconds, groups: Nanoseconds, ends: Nanoseconds
) -> Nanoseconds:
    """What the clock of each rank is ahead of that of one of them, from group to group that share a rank: those with
    the most collectives first."""
    order = np.lexsort((ranks, meetings, groups))
    rows = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1)
    parts = [(np.unique(ranks[row]), ends[row]) for row in rows]
    parts.sort(key=lambda part: -len(part[1]) / max(len(part[0]), 1))
    ahead, known = np.zeros(num_ranks, dtype=np.int64), np.arange(num_ranks) == [*parts[0][0], 0][0]
    while not known.all():
        own, left = next((part for part in parts if 0 < known[part[0]].sum() < len(part[0])), parts[0])
        here = known[own]
        if here.all():
            got, fix = f"none of number {int(np.argmin(known))} with others", "profile steps with collectives of all"
            raise DataError("the clocks of the ranks cannot be aligned", got=got, expected="collectives", fix=fix)
        apart = _apart(left.reshape(-1, len(own)))
        apart = apart + median_rank((ahead[own] - apart)[here])
        ahead[own[~here]], known[own] = apart[~here], True
    return ahead


def _apart(ends: Nanoseconds) -> Nanoseconds:
    """What the clock of each rank is ahead of their median, from the ends [collectives, ranks]: by the half of them
    that lie closest together, as a rank that leaves late was not let run."""
    apart = ends - median_rank(ends.T)[:, None]
    found = median_rank(apart)
    for _ in range(4):
        spread = np.ptp(apart - found, axis=1)
        found = median_rank(apart[spread <= np.median(spread)])
    return found


def _links(traces: Sequence[RankTrace], taken: Nanoseconds) -> list[Link]:
    """`taken`: nanoseconds of each collective of all ranks, in order; negative if that is not known."""
    found: dict[tuple[str, int, int], dict[str, list[tuple[int, int]]]] = {}
    numbered = ((trace.rank, each) for trace in traces for each in trace.collectives)
    for (rank, each), nanoseconds in zip(numbered, taken.tolist(), strict=True):
        if nanoseconds >= 0:
            groups = found.setdefault((each.kind, each.num_elements, each.num_ranks), {})
            groups.setdefault(each.group, []).append((rank, nanoseconds))
    links = list[Link]()
    for (kind, size, num_ranks), groups in found.items():
        medians = [float(np.median([each for _, each in rows])) for rows in groups.values()]
        usual = float(median_rank(np.array(medians)))
        for rows, median in zip(groups.values(), medians, strict=True):
            per_step = len(rows) / num_ranks / len(traces[0].steps)
            ranks = sorted({rank for rank, _ in rows})
            links.append(Link(per_step * (median - usual), ranks, kind, size, median, usual))
    return sorted(links, reverse=True)


def median_rank(values: NDArray[Any]) -> NDArray[Any]:
    """The median along the first dim; the lower one of an even number, as of two ranks one is slow, not both."""
    return np.asarray(np.quantile(values, 0.5, axis=0, method="lower"))
