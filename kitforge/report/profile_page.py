"""What a profile says: sentences with figures, a table of the ranks, and the page with a heat map of ranks and steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from kitforge.report.number_format import memory
from kitforge.report.page import document
from kitforge.report.panels import html_table
from kitforge.report.step_times import CAUSES, COMMUNICATION, COMPUTE, DATA, HOST, WAITING, StepTimes, others_median

COLUMNS = ("step", *CAUSES, "hidden", "peak memory")
# Shares of a step from which on a cause is named, and of its own step from which on a rank or a link is.
_NAMED = {COMMUNICATION: 0.1, WAITING: 0.1, DATA: 0.1, HOST: 0.25}
_SLOW_RANK, _SLOW_LINK, _SLOW_RATIO, _MEMORY_RATIO = 0.05, 0.02, 1.5, 1.25
_ADVICE = {
    COMMUNICATION: "collectives that nothing hides: fewer ranks that split a layer, larger micro-batches, or a faster link",
    WAITING: "waiting for the last rank of a collective, which is not always the same one: look for uneven batches",
    DATA: "waiting for its batch: raise data.num_workers or data.prefetch, or read from a faster disk",
    HOST: "neither computation nor communication: the host launches too slowly; raise trainer.micro_batch_size",
}
_PARTS = {
    COMPUTE: "it computes {more} longer; look at its device and at the size of its batches",
    DATA: "it waits {more} longer for its batches; look at its disk and at its part of the data",
    HOST: "its host takes {more} longer, outside computation and data; look at its processor and its callbacks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRank:
    """The rank with the most work (computation, data and host) against the median of the others, medians over steps."""

    rank: int
    excess: float  # nanoseconds of a step
    part: int  # the cause that most of it has
    part_excess: float


def slow_rank(times: StepTimes) -> SlowRank:
    """The slowest rank, by however little."""
    parts = [COMPUTE, DATA, HOST]
    excess = [_excess(times.causes[:, :, part]) for part in parts]
    own = work_excess(times)
    place = int(np.argmax(np.median(own, axis=1)))
    largest = max(range(len(parts)), key=lambda each: float(np.median(excess[each][place])))
    return SlowRank(
        rank=times.ranks[place],
        excess=float(np.median(own[place])),
        part=parts[largest],
        part_excess=float(np.median(excess[largest][place])),
    )


def work_excess(times: StepTimes) -> np.ndarray:
    """Nanoseconds [ranks, steps] that each rank works longer than the median of the others."""
    return _excess(times.causes[:, :, [COMPUTE, DATA, HOST]].sum(axis=2))


def _excess(values: np.ndarray) -> np.ndarray:
    return values - others_median(values)


def findings(times: StepTimes) -> list[str]:
    """What to know of the run, the costliest first, each with its figures and where to look."""
    step = float(np.median(times.causes.sum(axis=2)))
    shares = np.median(times.causes / times.causes.sum(axis=2, keepdims=True), axis=(0, 1))
    slow, found = slow_rank(times), []
    is_slow = len(times.ranks) > 1 and slow.excess >= _SLOW_RANK * step
    if is_slow:
        others = [place for place, rank in enumerate(times.ranks) if rank != slow.rank]
        waits = float(np.median(times.causes[others, :, WAITING]))
        more, part = milliseconds(slow.excess), _PARTS[slow.part].format(more=milliseconds(slow.part_excess))
        found.append(
            (
                slow.excess,
                f"rank {slow.rank} works {more} a step longer than the median of the others, which wait {milliseconds(waits)} ({waits / step:.0%} of a step): {part}",
            )
        )
    for cause, least in _NAMED.items():
        if shares[cause] >= least and not (cause == WAITING and is_slow):
            found.append((shares[cause] * step, f"{shares[cause]:.0%} of a step is {_ADVICE[cause]}"))
    for link in times.links[:3]:
        if link.excess >= _SLOW_LINK * step and link.nanoseconds >= _SLOW_RATIO * link.others:
            ranks = ", ".join(map(str, link.ranks[:8])) + ("" if len(link.ranks) <= 8 else ", ...")
            found.append(
                (
                    link.excess,
                    f"the link of ranks {ranks} is slow: {link.kind} of {memory(link.num_bytes)} takes {milliseconds(link.nanoseconds)} there and {milliseconds(link.others)} in the other groups; look at its network and at what shares it",
                )
            )
    largest, usual = max(times.peak_memory), float(np.median(times.peak_memory))
    words = [text for _, text in sorted(found, key=lambda each: -each[0])]
    if largest >= _MEMORY_RATIO * usual:
        words.append(
            f"rank {times.ranks[times.peak_memory.index(largest)]} takes {memory(largest)}, the median is {memory(usual)}: it limits the size of the batch"
        )
    if times.num_unmatched:
        words.append(
            f"{times.num_unmatched:,} collectives have no counterpart on every rank; their waiting counts as communication"
        )
    return words or ["no rank, link or cause stands out"]


def milliseconds(nanoseconds: float) -> str:
    """Nanoseconds as milliseconds: 12.3 ms."""
    return f"{nanoseconds / 1e6:,.1f} ms"


def rank_rows(times: StepTimes, most: int | None = None) -> list[tuple[str, list[str]]]:
    """A row for each rank in the order of COLUMNS, medians over steps; of more than `most`, of the slowest of them, and
    one of the medians of all."""
    ranks = range(len(times.ranks))
    chosen = [([rank], f"rank {times.ranks[rank]}") for rank in ranks]
    if most is not None and len(ranks) > most:
        slowest = np.argsort(-np.median(work_excess(times), axis=1), kind="stable")[:most]
        chosen = [chosen[rank] for rank in slowest] + [([*ranks], f"median of {len(ranks):,}")]
    rows = []
    for places, name in chosen:
        causes, transfers = times.causes[places], times.transfers[places].sum()
        hidden = f"{1 - causes[:, :, COMMUNICATION].sum() / transfers:.0%}" if transfers else "-"
        cells = [np.median(causes.sum(axis=2)), *np.median(causes, axis=(0, 1))]
        peak = float(np.median([times.peak_memory[place] for place in places]))
        rows.append((name, [*map(milliseconds, cells), hidden, memory(peak)]))
    return rows


def profile_page(times: StepTimes, heading: str) -> str:
    """The page, whose tables need no script."""
    words = "".join(f"<li>{escape(each)}</li>" for each in findings(times))
    steps = f"Steps {times.steps[0]} to {times.steps[-1]}; medians over them. The first traced step is left out."
    legend = "".join(f'<li><i class="fill-{cause}"></i>{name}</li>' for cause, name in enumerate(CAUSES))
    longest = float(np.median(times.causes.sum(axis=2), axis=1).max())
    bars = [
        (f"rank {rank}", [_bar(np.median(causes, axis=0) / longest)])
        for rank, causes in zip(times.ranks, times.causes, strict=True)
    ]
    excess = work_excess(times)
    largest = max(float(excess.max()), 1.0)
    heat = [
        (
            f"rank {rank}",
            [
                f'<span class="heat" style="--share:{max(0.0, each / largest):.0%}">{milliseconds(each)}</span>'
                for each in row
            ],
        )
        for rank, row in zip(times.ranks, excess.tolist(), strict=True)
    ]
    sections = (
        ("What stands out", f'<ul class="findings">{words}</ul><p class="note">{steps}</p>'),
        ("Ranks by cause", f'<ul class="legend">{legend}</ul>{html_table("", ["a step"], bars)}'),
        ("Numbers", html_table("", COLUMNS, rank_rows(times))),
        (
            "Work of ranks and steps, against the median of the other ranks",
            html_table("", [f"step {each}" for each in times.steps], heat),
        ),
    )
    body = "".join(f"<section><h2>{title}</h2>{html}</section>\n" for title, html in sections)
    return document(heading, "Kitforge profile", body)


def _bar(shares: Sequence[float]) -> str:
    parts = (f'<i class="fill-{cause}" style="width:{share:.2%}"></i>' for cause, share in enumerate(shares))
    return f'<div class="bar" aria-hidden="true">{"".join(parts)}</div>'
