"""Which charts the metrics of some runs make: pairing of training with evaluation, order, units, events to mark."""

from __future__ import annotations

from collections.abc import Sequence

from kitforge.report.metrics import LoggedEvent, RunRecord, Series
from kitforge.report.number_format import memory_unit
from kitforge.report.summary import PROGRESS, title
from kitforge.report.svg_chart import NUM_TONES, Chart, ChartLine, ChartMark

# These come first, in this order; whatever else a run logs follows by name.
_ORDER = (
    "loss",
    "learning_rate",
    "grad_norm",
    "time/input_tokens_per_second",
    "time/tokens_per_second",
    "time/samples_per_second",
    "time/memory_bytes",
    "time/step_seconds",
)
# What people watch while a model is aligned: what answers are worth, how far they are from where the policy began, and
# how fast it moves. A panel of its own where a run logs one of the first two.
_ALIGNMENT = (
    "reward",
    "rewards/margins",
    "reward_shaped",
    "reward_std",
    "kl",
    "completion/mean_length",
    "entropy",
    "clip_fraction",
    "explained_variance",
    "rewards/accuracy",
    "rewards/chosen",
    "rewards/rejected",
    "completion/eos_rate",
    "approx_kl",
    "value_loss",
    "kl_coef",
    "frac_reward_zero_std",
    "mismatch_kl",
)
# More of that by what its names begin with: each of several rewards, lengths, weights and turns.
_ALIGNMENT_GROUPS = ("rewards/", "completion/", "importance_sampling/", "environment/")
_UNITS = {
    "kl": "nats per completion",
    "completion/mean_length": "tokens",
    "entropy": "nats per token",
    "clip_fraction": "fraction of tokens",
    "approx_kl": "nats per token",
    "completion/eos_rate": "fraction of completions",
    "mismatch_kl": "nats per token",
    "frac_reward_zero_std": "fraction of groups",
    "completion/min_length": "tokens",
    "completion/max_length": "tokens",
    "completion/clipped_ratio": "fraction of completions",
    "importance_sampling/truncated_ratio": "fraction of tokens",
    "time/input_tokens_per_second": "tokens read per second",
    "time/tokens_per_second": "trained tokens per second",
    "time/samples_per_second": "samples per second",
    "time/step_seconds": "seconds",
    "time/evaluation_seconds": "seconds",
}
_MAY_BE_LOG = frozenset({"loss", "grad_norm", "perplexity"})
_MEMORY = "time/memory_bytes"
_BAD_WORDS = ("skip", "rollback", "interrupt", "error", "fail", "damage", "finite", "overflow", "spike")
_QUIET_WORDS = ("checkpoint", "evaluat", "sample", "report")
_MOST_MARKS = 60


def groups(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[tuple[str, list[Chart]]]:
    """The charts of `runs`, which are called `labels`, under the titles of their panels."""
    names = {_short(name) for run in runs for name, _ in _all(run) if _short(name) not in PROGRESS}
    is_aligned = not names.isdisjoint(_ALIGNMENT[:2])
    more = sorted(name for name in names if name.startswith(_ALIGNMENT_GROUPS) and name not in _ALIGNMENT)
    rewards = [name for name in _ALIGNMENT if name in names] + more if is_aligned else []
    others = names - set(rewards)
    ordered = [name for name in _ORDER if name in others] + sorted(others - set(_ORDER))
    found = [("Rewards and completions", rewards)] * is_aligned + [("Curves", ordered)]
    return [(title, [_chart(name, runs, labels) for name in chosen]) for title, chosen in found]


def charts(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[Chart]:
    """The same without their panels."""
    return [chart for _, drawn in groups(runs, labels) for chart in drawn]


def is_bad(event: LoggedEvent) -> bool:
    """Whether the event is one that a person should look at."""
    return any(word in event.name.lower() for word in _BAD_WORDS)


def _chart(name: str, runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    divisor, unit = 1.0, _UNITS.get(name, "")
    if name == _MEMORY:
        sizes = [value for run in runs for key, series in _all(run) if key == name for _, value in series.finite()]
        divisor, unit = memory_unit(max(sizes, default=0.0))
    is_first = name == "loss"
    return Chart(
        title=title(name),
        unit=unit,
        lines=tuple(line for number in range(len(runs)) for line in _lines(name, number, runs, labels, divisor)),
        marks=_marks(runs, labels) if is_first else (),
        is_wide=is_first,
        may_be_log=name in _MAY_BE_LOG,
    )


def _lines(name: str, run: int, runs: Sequence[RunRecord], labels: Sequence[str], divisor: float) -> list[ChartLine]:
    is_alone = len(runs) == 1
    lines: list[ChartLine] = []
    for is_evaluation, group in ((False, runs[run].train), (True, runs[run].eval)):
        word = "evaluation" if is_evaluation else "training"
        lines.extend(
            ChartLine(
                label=word if is_alone else labels[run] + (" (evaluation)" if is_evaluation else ""),
                series=_divided(series, divisor),
                run=run,
                # A run of its own may spend a second colour on its evaluation.
                tone=int(is_evaluation) if is_alone else run % NUM_TONES,
                is_evaluation=is_evaluation,
            )
            for key, series in group.items()
            if _short(key) == name
        )
    return lines


def _marks(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[ChartMark, ...]:
    """The latest events worth a mark; all of them stand in the list of events."""
    marks = [
        ChartMark(
            step=event.step,
            label=f"{'' if len(runs) == 1 else label + ': '}{event.name} at step {event.step:,}",
            is_bad=is_bad(event),
        )
        for run, label in zip(runs, labels, strict=True)
        for event in _marked(run)[-_MOST_MARKS // len(runs) :]
    ]
    return tuple(marks)


def _marked(run: RunRecord) -> list[LoggedEvent]:
    return [event for event in run.events if not any(word in event.name.lower() for word in _QUIET_WORDS)]


def _divided(series: Series, divisor: float) -> Series:
    if divisor == 1.0:
        return series
    return Series(steps=series.steps, values=tuple(value / divisor for value in series.values))


def _all(run: RunRecord) -> list[tuple[str, Series]]:
    return [*run.train.items(), *run.eval.items()]


def _short(name: str) -> str:
    return name.removeprefix("eval/")
