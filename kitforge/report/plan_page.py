"""The page of a plan: memory over a step by cause, the passes of the ranks of a pipeline, time by cause, and layouts.

Plain numbers and words come in; all drawings are still, and need no script.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from kitforge.report.number_format import memory, memory_unit, number
from kitforge.report.page import document
from kitforge.report.panels import html_table

# Passes that are drawn at most: of more ranks some are left out.
_MOST_PASSES = 4000
_PASSES = {
    "F": ("forward", 0),
    "B": ("backward", 1),
    "I": ("gradients of inputs", 3),
    "W": ("gradients of weights", 2),
    "U": ("reductions and update", 7),
}


class DrawnPass(NamedTuple):
    """A pass of a rank, in seconds from the begin of the step."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    end: float


def plan_page(
    heading: str,
    words: Sequence[str],
    course: Sequence[tuple[str, Mapping[str, int]]],
    ranks: Sequence[Sequence[DrawnPass]] = (),
    seconds: Mapping[str, float] | None = None,
    layouts: Sequence[Mapping[str, object]] = (),
) -> str:
    """`words` are sentences about the plan, `course` is the moment and the bytes by cause at points of a step in their
    order, `ranks` are the passes of each, `seconds` those of a step by cause, and `layouts` rows with the same keys."""
    sections = {"In words": f"<ul>{''.join(f'<li>{escape(each)}</li>' for each in words)}</ul>"}
    sections["Memory over a step"] = _memory(course)
    if ranks:
        sections["Passes of a step"] = _passes(ranks)
    if seconds:
        sections["Time of a step by cause"] = _seconds(seconds)
    if layouts:
        rows = [(str(row), [escape(str(each)) for each in cells.values()]) for row, cells in enumerate(layouts, 1)]
        sections["Layouts, the fastest first"] = html_table("", [escape(name) for name in layouts[0]], rows)
    body = "".join(f"<section><h2>{title}</h2>{html}</section>\n" for title, html in sections.items())
    return document(heading, "Kitforge plan", body)


def _memory(course: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """Areas one above the other, those that are largest at the peak below, the peak marked; and their numbers."""
    totals = [sum(sizes.values()) for _, sizes in course]
    at = totals.index(max(totals))
    moment, peak = course[at]
    causes = [name for name in peak if any(sizes[name] for _, sizes in course)]
    unit, name_of_unit = memory_unit(totals[at])
    width = 1000 / max(len(course) - 1, 1)
    below, areas = [0.0] * len(course), []
    for index, cause in enumerate(causes):
        above = [low + 1000 * sizes[cause] / totals[at] for low, (_, sizes) in zip(below, course, strict=True)]
        edge = [*enumerate(above), *reversed([*enumerate(below)])]
        points = " ".join(f"{width * x:.1f},{1000 - y:.1f}" for x, y in edge)
        title, style = f"<title>{escape(cause)}</title>", f"fill:{_colour(index)}"
        areas.append(f'<polygon points="{points}" style="{style}">{title}</polygon>')
        below = above
    areas.append(f'<path class="mark bad" style="stroke-width:2" d="M{width * at:.1f} 0V1000"/>')
    heights = ((part, number(part * totals[at] / unit)) for part in (0, 0.5, 1))
    ticks = "".join(f'<span style="bottom:{part:.0%}">{text}</span>' for part, text in heights)
    title = f"bytes by cause over a step, at most {memory(totals[at])}"
    drawing = (
        f'<div class="plot" style="--height:18rem;margin-top:1rem"><div class="y" aria-hidden="true">{ticks}</div>'
        f'<div class="area"><svg viewBox="0 0 1000 1000" preserveAspectRatio="none" role="img" aria-label="{title}">'
        f'{"".join(areas)}</svg></div><div class="x" data-axis="{name_of_unit}" aria-hidden="true"></div></div>'
    )
    note = f"The peak, {memory(totals[at])}, is in the {moment}; points stand in the order in which memory changes."
    parts_at_peak = [(name, size) for name, size in sorted(peak.items(), key=lambda each: -each[1]) if size]
    rows = [(escape(name), [memory(size), f"{size / totals[at]:.1%}"]) for name, size in parts_at_peak]
    legend = _legend((cause, _colour(index)) for index, cause in enumerate(causes))
    return f'{legend}{drawing}<p class="note">{escape(note)}</p>{html_table("At the peak", ["", "of it"], rows)}'


def _passes(ranks: Sequence[Sequence[DrawnPass]]) -> str:
    """A line of each rank, with gaps where it waits."""
    end = max(each.end for rank in ranks for each in rank)
    step = max(1, -(-sum(map(len, ranks)) // _MOST_PASSES))
    shown = sorted({*range(0, len(ranks), step), len(ranks) - 1})
    rows = []
    for rank in shown:
        parts = []
        for each in ranks[rank]:
            where = f"micro-batch {each.micro_batch}, stage {each.stage}, " if each.kind != "U" else ""
            span = f'x="{1000 * each.start / end:.2f}" width="{1000 * (each.end - each.start) / end:.2f}" height="20"'
            title = f"{_PASSES[each.kind][0]}, {where}{1e3 * each.start:.4g} to {1e3 * each.end:.4g} ms"
            # Edges tell a pass from the next one.
            style = f"fill:{_colour(_PASSES[each.kind][1])};stroke:var(--card);stroke-width:.6"
            parts.append(f'<rect {span} style="{style}"><title>{title}</title></rect>')
        busy = sum(each.end - each.start for each in ranks[rank])
        style = "display:block;width:100%;min-width:24rem;height:1.2rem;background:var(--line)"
        drawn = f'<svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true" style="{style}">'
        drawn += f"{''.join(parts)}</svg>"
        rows.append((f"rank {rank}", [drawn, f"{max(0.0, 1 - busy / end):.1%}"]))
    kinds = {each.kind for rank in ranks for each in rank}
    legend = _legend((name, _colour(tone)) for kind, (name, tone) in _PASSES.items() if kind in kinds)
    note = f"The step takes {1e3 * end:,.4g} ms; what is grey is waiting."
    note += f" {len(shown)} of {len(ranks)} ranks of the pipeline are drawn." if len(shown) < len(ranks) else ""
    return f'{legend}{html_table("", ["", "waits"], rows)}<p class="note">{note}</p>'


def _seconds(seconds: Mapping[str, float]) -> str:
    whole = sum(seconds.values())
    rows = []
    for cause, each in sorted(seconds.items(), key=lambda pair: -pair[1]):
        bar = f'<div class="bar" aria-hidden="true"><i class="fill-1" style="width:{each / whole:.2%}"></i></div>'
        rows.append((escape(cause), [f"{1e3 * each:,.2f}", f"{each / whole:.1%}", bar]))
    return html_table("", ["ms", "of it", ""], rows)


def _legend(names: Iterable[tuple[str, str]]) -> str:
    parts = (f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in names)
    return f'<ul class="legend">{"".join(parts)}</ul>'


def _colour(index: int) -> str:
    """Of eight tones, then of their halves."""
    tone = f"var(--tone-{index % 8})"
    return tone if index < 8 else f"color-mix(in srgb, {tone} 50%, var(--card))"
