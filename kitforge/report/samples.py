"""The samples panel, as HTML: the first samples beside the last, then the samples of each step, the latest first."""

from collections.abc import Sequence
from html import escape

from kitforge.report.metrics import RunRecord, Sample, SampleSet
from kitforge.report.number_format import number

# The page names the number of samples beyond these.
_MOST_SAMPLE_SETS, _MOST_SAMPLES, _MOST_CHARACTERS = 8, 8, 3000


def samples(run: RunRecord) -> str:
    """The samples of one run: before and after side by side if prompts repeat, then step by step."""
    shown = run.samples[:_MOST_SAMPLE_SETS]
    aside = side_by_side(run.samples)
    steps = "".join(_sample_set(each, is_open=index == 0 and not aside) for index, each in enumerate(shown))
    left = len(run.samples) - len(shown)
    note = f'<p class="note">{left:,} earlier steps are not shown here; the folder samples holds all of them.</p>'
    return aside + steps + (note if left else "")


def side_by_side(sets: Sequence[SampleSet]) -> str:
    """The earliest samples beside the latest; empty if no prompt repeats. `sets` has the latest first."""
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
    note = f'<p class="note">{left:,} more samples: samples/step_{samples.step}.json</p>' if left else ""
    body = "".join(_sample(sample) for sample in shown)
    return (
        f"<details{' open' if is_open else ''}><summary>Step {samples.step:,}</summary>"
        f'<div class="samples">{body}</div>{note}</details>'
    )


def _sample(sample: Sample) -> str:
    """The prompt, its completion, and numbers about the completion."""
    left = len(sample.text) - _MOST_CHARACTERS
    note = f" <em>({left:,} more characters)</em>" if left > 0 else ""
    prompt = f'<span class="unseen">Prompt: </span><mark>{escape(sample.prompt)}</mark>' if sample.prompt else ""
    figures = ", ".join(f"{escape(name)} {number(value)}" for name, value in sample.figures.items())
    return (
        f'<blockquote>{prompt}<span class="unseen"> Continuation: </span>'
        f"{escape(sample.text[:_MOST_CHARACTERS])}{note}"
        f"{f'<footer>{figures}</footer>' if figures else ''}</blockquote>"
    )
