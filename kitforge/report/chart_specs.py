"""The charts of a report: which metrics share a chart, in which order, in which units, with which events marked."""

from collections.abc import Sequence

from kitforge.report.chart import NUM_TONES, Chart, ChartLine, ChartMark
from kitforge.report.metrics import LoggedEvent, RunRecord, Series
from kitforge.report.number_format import memory_unit
from kitforge.report.summary import by_number, evaluated_by, is_curve, title

# These come first, in this order; all other metrics follow by name.
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
# Bounds and baselines are lines of the chart that they belong to: its name, and theirs.
_BOUNDS = {"best_auc": ("auc", "best possible")}
_BASELINE = "popularity_"
# RLHF metrics: rewards, KL divergence, completions and the size of the updates. They form a panel of their own if a run
# logs one of the first three.
_ALIGNMENT = (
    "reward",
    "rewards/margins",
    "distill/reverse_kl",
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
# Further RLHF metrics by prefix.
_ALIGNMENT_GROUPS = ("rewards/", "distill/", "completion/", "importance_sampling/", "environment/")
# Of a mixture of experts, the load of each; all of them share one chart.
_LOAD = "experts/load/"
# The tones of a single run's curves; a bound or a baseline has the next one.
_KINDS = {"training": 0, "validation": 1}
_UNITS = {
    "experts/fullest": "times the mean load, in any block",
    "experts/dropped": "fraction of choices",
    "kl": "nats per completion",
    "completion/mean_length": "tokens",
    "distill/reverse_kl": "nats per token",
    "distill/forward_kl": "nats per token",
    "distill/agreement": "fraction of tokens",
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
_QUIET_WORDS = ("run", "checkpoint", "evaluat", "sample", "report")
_MOST_MARKS = 60


def chart_groups(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[tuple[str, list[Chart]]]:
    """The charts of `runs`, which are called `labels`, under the titles of their panels."""
    names = {name for run in runs for name, *_ in _series(run)}
    is_aligned = not names.isdisjoint(_ALIGNMENT[:3])
    more = sorted(names - set(_ALIGNMENT), key=by_number)
    more = [name for name in more if name.startswith(_ALIGNMENT_GROUPS)]
    rewards = [name for name in _ALIGNMENT if name in names] + more if is_aligned else []
    loads = sorted(name for name in names if name.startswith("experts/"))
    others = names - set(rewards) - set(loads)
    # The metric that selects the weights comes right after the loss.
    leading = {evaluated[0].removeprefix("eval/") for run in runs if (evaluated := evaluated_by(run))}
    first = (_ORDER[0], *sorted(leading - set(_ORDER)), *_ORDER[1:])
    ordered = [name for name in first if name in others] + sorted(others - set(first), key=by_number)
    signal = "Rewards" if not names.isdisjoint(_ALIGNMENT[:2]) else "Distillation"
    panels = [(f"{signal} and completions", rewards)] * is_aligned + [("Curves", ordered)]
    found = [(title, [_chart(name, runs, labels) for name in chosen]) for title, chosen in panels]
    if loads:
        further = [_chart(name, runs, labels) for name in loads if not name.startswith(_LOAD)]
        found.append(("Load of the experts", [_load_chart(runs, labels), *further]))
    return found


def is_bad(event: LoggedEvent) -> bool:
    """Whether the event is one that a person should look at."""
    return any(word in event.name.lower() for word in _BAD_WORDS)


def _chart(name: str, runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    divisor, unit = 1.0, _UNITS.get(name, "")
    if name == _MEMORY:
        found = [series for run in runs for key, series, _ in _series(run) if key == name]
        sizes = [value for series in found for _, value in series.finite()]
        divisor, unit = memory_unit(max(sizes, default=0.0))
    is_first = name == "loss"
    is_policy = any("reward" in run.train for run in runs)
    return Chart(
        title="Training loss" if is_first and is_policy else title(name),
        unit=unit,
        lines=tuple(line for number in range(len(runs)) for line in _lines(name, number, runs, labels, divisor)),
        marks=_marks(runs, labels) if is_first else (),
        is_wide=is_first,
        may_be_log=name in _MAY_BE_LOG,
    )


def _load_chart(runs: Sequence[RunRecord], labels: Sequence[str]) -> Chart:
    """The tokens of the fullest, the median and the emptiest expert over the mean, at each step."""
    lines = []
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        loads = [series for name, series in run.train.items() if name.startswith(_LOAD)]
        ranked = [sorted(values) for values in zip(*(series.values for series in loads), strict=False)]
        indices = {"fullest": -1, "median": len(loads) // 2, "emptiest": 0} if loads else {}
        for tone, (name, index) in enumerate(indices.items()):
            series = Series(steps=loads[0].steps[: len(ranked)], values=tuple(values[index] for values in ranked))
            own, colour = (name, tone) if len(runs) == 1 else (f"{label}: {name}", number % NUM_TONES)
            lines.append(ChartLine(label=own, series=series, run=number, tone=colour))
    return Chart(title="Load of the experts", unit="times the mean load", lines=tuple(lines), is_wide=True)


def _lines(name: str, run: int, runs: Sequence[RunRecord], labels: Sequence[str], divisor: float) -> list[ChartLine]:
    is_alone = len(runs) == 1
    return [
        ChartLine(
            label=kind if is_alone else labels[run] + ("" if kind == "training" else f" ({kind})"),
            series=Series(steps=series.steps, values=tuple(value / divisor for value in series.values)),
            run=run,
            # The validation curve has a colour of its own if there is only one run.
            tone=_KINDS.get(kind, len(_KINDS)) if is_alone else run % NUM_TONES,
            is_evaluation=kind != "training",
        )
        for key, series, kind in _series(runs[run])
        if key == name
    ]


def _marks(runs: Sequence[RunRecord], labels: Sequence[str]) -> tuple[ChartMark, ...]:
    """The latest events of each run, without checkpoints and the like; the list of events holds all of them."""
    marked = [
        [event for event in run.events if not any(word in event.name.lower() for word in _QUIET_WORDS)] for run in runs
    ]
    marks = [
        ChartMark(
            step=event.step,
            label=f"{'' if len(runs) == 1 else label + ': '}{event.name} at step {event.step:,}",
            is_bad=is_bad(event),
        )
        for found, label in zip(marked, labels, strict=True)
        for event in found[-_MOST_MARKS // len(runs) :]
    ]
    return tuple(marks)


def _series(run: RunRecord) -> list[tuple[str, Series, str]]:
    """Every series that is drawn, with the name of its chart and what it is there: training, validation, a bound or a
    baseline. Both curves of a metric share a chart, but for the losses of a policy: its training loss is not a measure
    of the evaluated completions."""
    found = [(name, series, "training") for name, series in run.train.items() if is_curve(name)]
    for name, series in run.eval.items():
        bare = name.removeprefix("eval/")
        chart, kind = _BOUNDS.get(bare, (bare.removeprefix(_BASELINE), "popularity" if _BASELINE in bare else ""))
        if kind and f"eval/{chart}" in run.eval:
            found.append((chart, series, kind))
        elif is_curve(name):
            is_apart = name == "eval/loss" and "reward" in run.train
            found.append((name if is_apart else bare, series, "validation"))
    return found
