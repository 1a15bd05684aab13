"""What a profile says: sentences with figures, numbers of the ranks, and a page with a heat map of ranks and steps."""

from html import escape

import numpy as np
from numpy.typing import NDArray

from kitforge.report.number_format import memory, short_count
from kitforge.report.page import document
from kitforge.report.panels import html_table
from kitforge.report.step_times import CAUSES, COMMUNICATION, COMPUTE, DATA, HOST, WAITING, StepTimes, median_rank

COLUMNS = ("step", "compute", "exposed", *CAUSES[WAITING:], "hidden", "memory")
# Causes that are named from a share of a step on, each with where to look.
_CAUSES = {
    COMMUNICATION: (
        0.1,
        "communication that no computation hides: cut layers over fewer ranks, or take more rows a rank",
    ),
    WAITING: (0.1, "waiting for the last rank of a collective, not always the same one: look for uneven batches"),
    DATA: (0.1, "waiting for its batch: raise data.num_workers or data.prefetch, or look at the disk"),
    HOST: (0.25, "neither computation nor communication: the host is slow; raise trainer.micro_batch_size"),
}
_PARTS = {COMPUTE: "computing; look at its device", DATA: "loading data; look at its disk", HOST: "on its host"}
# Shares of a step that a slow rank and a slow link cost, and how much longer the link takes.
_SLOW_RANK, _SLOW_LINK, _SLOW_RATIO, _MEMORY_RATIO = 0.05, 0.02, 1.5, 1.25


def findings(times: StepTimes) -> list[str]:
    """What to know of the run, the costliest first, each with its figures and where to look."""
    step = float(np.median(times.causes.sum(axis=2)))
    found = list[tuple[float, str]]()
    excess = np.median(work_excess(times), axis=1)
    slow = int(excess.argmax())
    is_slow = excess[slow] >= _SLOW_RANK * step
    if is_slow:
        parts = {
            part: np.median(times.causes[slow, :, part] - median_rank(times.causes[:, :, part])) for part in _PARTS
        }
        waits = float(np.median(np.delete(times.causes[:, :, WAITING], slow, axis=0)))
        more = f"works {_ms(excess[slow])} ms a step longer than the median rank, most of it"
        part = _PARTS[max(parts, key=lambda each: float(parts[each]))]
        words = f"rank {times.ranks[slow]} {more} {part}; the others wait {_ms(waits)} ms a step ({waits / step:.0%})"
        found.append((excess[slow], words))
    shares = np.median(times.causes / times.causes.sum(axis=2, keepdims=True), axis=(0, 1))
    for cause, (least, words) in _CAUSES.items():
        if shares[cause] >= least and not (is_slow and cause == WAITING):
            found.append((shares[cause] * step, f"{shares[cause]:.0%} of a step is {words}"))
    for link in times.links[:1]:
        if link.excess >= _SLOW_LINK * step and link.nanoseconds >= _SLOW_RATIO * link.usual:
            what = f"{link.kind} of {short_count(link.num_elements)} numbers takes {_ms(link.nanoseconds)} ms there"
            ranks = ", ".join(map(str, link.ranks[:8])) + ", ..." * (len(link.ranks) > 8)
            words = f"the link of ranks {ranks} is slow: {what} and {_ms(link.usual)} ms in the median group"
            found.append((link.excess, words))
    words_found = [words for _, words in sorted(found, reverse=True)]
    most, usual = int(times.peak_memory.argmax()), float(median_rank(times.peak_memory))
    if times.peak_memory[most] >= _MEMORY_RATIO * usual:
        size = f"takes {memory(float(times.peak_memory[most]))} and the median rank {memory(usual)}"
        words_found.append(f"rank {times.ranks[most]} {size}: it limits the size of the batch")
    if times.num_unmatched:
        words_found.append(f"{times.num_unmatched:,} collectives lack a rank; to wait in them counts as communication")
    return words_found or ["no rank, link or cause stands out"]


def work_excess(times: StepTimes) -> NDArray[np.int64]:
    """Nanoseconds [ranks, steps] that a rank computes, loads data and is on its host longer than the median rank."""
    work = times.causes[:, :, [COMPUTE, DATA, HOST]].sum(axis=2)
    return np.asarray(work - median_rank(work))


def rank_rows(times: StepTimes, most: int | None = None) -> list[tuple[str, list[str]]]:
    """By rank its numbers in the order of COLUMNS, milliseconds, medians over steps; of more than `most` ranks the
    slowest of them, and the medians of all."""
    chosen = [([index], f"rank {rank}") for index, rank in enumerate(times.ranks)]
    if most is not None and len(chosen) > most:
        slowest = np.median(work_excess(times), axis=1).argsort(kind="stable")[: -most - 1 : -1]
        chosen = [*(chosen[index] for index in slowest), ([*range(len(chosen))], f"median of {len(chosen):,}")]
    rows = []
    for rows_of, name in chosen:
        causes, transfers = times.causes[rows_of], int(times.transfers[rows_of].sum())
        hidden = f"{1 - causes[:, :, COMMUNICATION].sum() / transfers:.0%}" if transfers else "-"
        numbers = [np.median(causes.sum(axis=2)), *np.median(causes, axis=(0, 1))]
        rows.append((name, [*map(_ms, numbers), hidden, memory(float(np.median(times.peak_memory[rows_of])))]))
    return rows


def profile_page(times: StepTimes, heading: str) -> str:
    """The page, whose tables need no script."""
    words = "".join(f"<li>{escape(each)}</li>" for each in findings(times))
    legend = "".join(f'<li><i class="fill-{cause}"></i>{name}</li>' for cause, name in enumerate(CAUSES))
    medians, excess = np.median(times.causes, axis=1), work_excess(times)
    shares, heats = medians / medians.sum(axis=1).max(), np.maximum(excess, 0) / max(excess.max(), 1)
    bars, cells = [], []
    for index, rank in enumerate(times.ranks):
        parts = (f'<i class="fill-{cause}" style="width:{width:.2%}"></i>' for cause, width in enumerate(shares[index]))
        bars.append((f"rank {rank}", [f'<div class="bar" aria-hidden="true">{"".join(parts)}</div>']))
        row = zip(excess[index], heats[index], strict=True)
        cell = [f'<span class="heat" style="--share:{heat:.0%}">{_ms(each)}</span>' for each, heat in row]
        cells.append((f"rank {rank}", cell))
    steps = f"Steps {times.steps[0]} to {times.steps[-1]}, medians over them in milliseconds."
    sections = {
        "What stands out": f'<ul>{words}</ul><p class="note">{steps}</p>',
        "Ranks by cause": f'<ul class="legend">{legend}</ul>{html_table("", ["a step"], bars)}',
        "Numbers": html_table("", COLUMNS, rank_rows(times)),
        "Longer at work than the median rank": html_table("", [f"step {step}" for step in times.steps], cells),
    }
    body = "".join(f"<section><h2>{title}</h2>{html}</section>\n" for title, html in sections.items())
    return document(heading, "Kitforge profile", body)


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:,.1f}"
