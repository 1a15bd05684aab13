"""The panel about samples, as HTML: the first ones beside the last ones, then every step's, the latest first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kitforge.report.metrics import RunRecord, Sample, SampleSet
from kitforge.report.number_format import number

# Above these the page says how much more there is and where it lies.
_MOST_SAMPLE_SETS, _MOST_SAMPLES, _MOST_CHARACTERS = 8, 8, 3000


def samples(run: RunRecord) -> str:
    """The samples of one run: before and after side by side where the prompts are the same, then step by step."""
    shown = run.samples[:_MOST_SAMPLE_SETS]
    aside = side_by_side(run.samples)
    steps = "".join(_sample_set(each, is_open=index == 0 and not aside) for index, each in enumerate(shown))
    left = len(run.samples) - len(shown)
    note = f'<p class="note">{left:,} earlier steps are not shown here; they lie in the folder samples.</p>'
    return aside + steps + (note if left else "")


def side_by_side(sets: Sequence[SampleSet]) -> str:
    """The earliest samples beside the latest, `sets` being the latest first; nothing where no prompt came twice."""
    if len(sets) < 2:
        return ""
    last, first = sets[0], sets[-1]
    began = {each.prompt: each for each in reversed(first.samples)}
    pairs = [(began[each.prompt], each) for each in last.samples if each.prompt in began][:_MOST_SAMPLES]
    if not pairs:
        return ""
    heads = "".join(f"<h3>Step {each.step:,}</h3>" for each in (first, last))
    body = "".join(_sample(before) + _sample(after) for before, after in pairs)
    return f'<div class="pairs">{heads}{body}</div>'


def _sample_set(samples: SampleSet, *, is_open: bool) -> str:
    shown = samples.samples[:_MOST_SAMPLES]
    left = len(samples.samples) - len(shown)
    note = f'<p class="note">{left:,} more samples lie in samples/step_{samples.step}.json.</p>' if left else ""
    body = "".join(_sample(sample) for sample in shown)
    return (
        f"<details{' open' if is_open else ''}><summary>Step {samples.step:,}</summary>"
        f'<div class="samples">{body}</div>{note}</details>'
    )


def _sample(sample: Sample) -> str:
    """The prompt, set off, its continuation, and what was found out about it."""
    left = len(sample.text) - _MOST_CHARACTERS
    note = f" <em>({left:,} more characters)</em>" if left > 0 else ""
    prompt = f'<span class="unseen">Prompt: </span><mark>{escape(sample.prompt)}</mark>' if sample.prompt else ""
    figures = ", ".join(f"{escape(name)} {number(value)}" for name, value in sample.figures.items())
    return (
        f'<blockquote>{prompt}<span class="unseen"> Continuation: </span>'
        f"{escape(sample.text[:_MOST_CHARACTERS])}{note}"
        f"{f'<footer>{figures}</footer>' if figures else ''}</blockquote>"
    )
