"""Headline numbers of a run, titles of its metrics, and whether higher or lower is better."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from kitforge.report.metrics import RunRecord, Series
from kitforge.report.number_format import duration, memory, number, short_count

Goal = Literal["lower", "higher"] | None

# Progress of a run: shown as numbers, not drawn as curves.
_PROGRESS = frozenset({"epoch", "tokens", "samples", "skipped", "time/seconds"})
# The share of the evaluation's values of a feature that training never saw: of all features, one table.
SHARES = "eval/unknown_share/"
# The most that one sentence names.
_NAMED_SHARES = 3

_TITLES = {
    "grad_norm": "Gradient norm",
    "eval/loss": "Validation loss",
    "eval/accuracy": "Validation accuracy",
    "eval/f1": "Validation F1 (macro)",
    "eval/mse": "Validation mean squared error",
    "eval/pearson": "Validation correlation (Pearson)",
    "best_auc": "Best possible AUC",
    "kl": "KL to the reference",
    "approx_kl": "Approx. KL",
    "kl_coef": "KL coefficient",
    "mismatch_kl": "Train-inference mismatch KL",
    "rewards/chosen": "Chosen reward",
    "rewards/rejected": "Rejected reward",
    "rewards/margins": "Reward margin",
    "rewards/accuracy": "Reward accuracy",
    "frac_reward_zero_std": "Groups with zero reward std",
    "completion/eos_rate": "Finished completions",
    "completion/clipped_ratio": "Truncated completions",
    "completion/mean_length": "Mean completion length",
    "completion/min_length": "Shortest completion",
    "completion/max_length": "Longest completion",
    "time/input_tokens_per_second": "Throughput",
    "time/tokens_per_second": "Throughput",
    "time/samples_per_second": "Throughput",
    "time/memory_bytes": "Memory",
    "time/step_seconds": "Step time",
    "time/evaluation_seconds": "Evaluation time",
}
_THROUGHPUTS = (
    ("time/input_tokens_per_second", "tokens/s read"),
    ("time/tokens_per_second", "tokens/s"),
    ("time/samples_per_second", "samples/s"),
)
# Words of a name by which lower or higher is better; of one side of a pair and of a standard deviation neither is.
_LOWER = re.compile("loss|nll|perplexity|ppl|error|rmse|mse|mae|bytes|seconds")
_HIGHER = re.compile(
    "accuracy|acc|auc|gauc|f1|precision|recall|ndcg|mrr|map|hr|hits?|bleu|second|reward|margins?|explained|pearson"
)
_NEITHER = re.compile("chosen|rejected|std")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number with its label, as text and as a value to compare by (nan when it cannot be compared)."""

    label: str
    text: str
    detail: str = ""
    value: float = math.nan
    goal: Goal = None


def title(name: str) -> str:
    """A metric's name for people: "grad_norm" is "Gradient norm"."""
    if name in _TITLES:
        return _TITLES[name]
    words = name.removeprefix("time/").replace("_", " ").replace("/", " / ").strip()
    words = re.sub(r"\b(auc|hr|mrr|ndcg)\b", lambda found: found[0].upper(), words)
    return words[:1].upper() + words[1:]


def goal(name: str) -> Goal:
    """Whether lower or higher is better, by the words of the metric's name; None if they do not say."""
    words = re.split(r"[^a-z0-9]+", name.rpartition("/")[2].lower())
    if any(map(_NEITHER.fullmatch, words)):
        return None
    if any(map(_LOWER.fullmatch, words)):
        return "lower"
    return "higher" if any(map(_HIGHER.fullmatch, words)) else None


def is_curve(name: str) -> bool:
    """Whether a metric is drawn."""
    return name.removeprefix("eval/") not in _PROGRESS and not name.startswith(SHARES)


def by_number(name: str) -> str:
    """Sorts names with the numbers in them as numbers: hr@5 comes before hr@10."""
    return re.sub(r"[0-9]+", lambda found: found[0].zfill(20), name)


def metric_words(metrics: Mapping[str, float], leading: str | None = None) -> list[tuple[str, str]]:
    """Names and values for a terminal, the metric `leading` first, with the largest shares of unknown values in one
    sentence."""
    names = sorted(metrics, key=lambda name: name != leading)
    words = [(name, f"{metrics[name]:.4f}") for name in names if not name.startswith(SHARES)]
    shares = {name.removeprefix(SHARES): value for name, value in metrics.items() if name.startswith(SHARES)}
    largest = sorted((name for name in shares if shares[name] > 0), key=lambda name: (-shares[name], name))
    named = [f"{name} {shares[name]:.0%}" for name in largest[:_NAMED_SHARES]]
    named += [f"{len(largest) - _NAMED_SHARES} more features"] if len(largest) > _NAMED_SHARES else []
    return [*words, ("unknown values", ", ".join(named))] if named else words


def headline(run: RunRecord) -> list[Figure]:
    """Best evaluation, reward, loss, steps, data, time, throughput and peak memory, as far as the run logged them."""
    skipped, spent = num_skipped(run), seconds(run)
    steps = Figure(label="Steps", text=f"{num_steps(run):,}", detail=f"{skipped:,} skipped" if skipped else "")
    figures = [best_evaluation(run), _now("reward", run), _now("loss", run), steps]
    seen = "tokens" if "tokens" in run.train else "samples"
    if amounts := [value for _, value in _finite(run, seen)]:
        epochs = _finite(run, "epoch")
        detail = f"{number(round(epochs[-1][1], 2))} epochs" if epochs else ""
        figures.append(Figure(label=title(seen), text=short_count(max(amounts)), detail=detail))
    if spent > 0:
        figures.append(Figure(label="Time", text=duration(spent), value=spent, goal="lower"))
    for name, unit in _THROUGHPUTS:
        if rates := [value for _, value in _finite(run, name)]:
            median, detail = statistics.median(rates), f"{unit}, median"
            text = short_count(median)
            figures.append(Figure(label="Throughput", text=text, detail=detail, value=median, goal="higher"))
            break
    if peaks := [value for _, value in _finite(run, "time/memory_bytes")]:
        figures.append(Figure(label="Peak memory", text=memory(max(peaks)), value=max(peaks), goal="lower"))
    return [figure for figure in figures if figure is not None]


def last_values(run: RunRecord) -> list[Figure]:
    """The last value of every metric that the headline leaves out. Of an evaluation it is the value of the weights that
    the run kept."""
    train = {name: series for name, series in run.train.items() if not name.startswith("time/")}
    left_out = {"loss", "reward", "learning_rate"}
    return [
        Figure(
            label=f"Last {word}{_inner_title(name.removeprefix('eval/'))}",
            text=number(value),
            value=value,
            goal=None if name == "grad_norm" else goal(name),
        )
        for word, group in (("validation ", run.eval), ("", train))
        for name in sorted(group, key=by_number)
        if name not in left_out and not name.startswith("time/") and is_curve(name)
        for value in [kept_value(run, name) if word else group[name].values[-1]]
    ]


def kept_value(run: RunRecord, name: str) -> float:
    """The value of an evaluation metric for the weights that the run kept."""
    series = run.eval[name]
    found = dict[int | None, float](zip(series.steps, series.values, strict=True))
    return found.get(run.weights_of_step, series.values[-1])


def best_evaluation(run: RunRecord) -> Figure | None:
    """The best value of the metric that `evaluated_by` names."""
    found = evaluated_by(run)
    if found is None:
        return None
    name, way = found
    pick = min if way == "lower" else max
    step, value = pick(run.eval[name].finite(), key=lambda point: point[1])
    label = f"Best validation {_inner_title(name.removeprefix('eval/'))}"
    return Figure(label=label, text=number(value), detail=f"at step {step:,}", value=value, goal=way)


def evaluated_by(run: RunRecord) -> tuple[str, Goal] | None:
    """The metric that ranks the evaluations, and its better way: the one that selects the weights; of a run that does
    not name it, the reward, else the loss, else the first with a known better way."""
    known = {name: goal(name) for name in run.eval if run.eval[name].finite()}
    if run.metric_for_best is not None and run.metric_for_best[0] in known:
        name, mode = run.metric_for_best
        return name, "lower" if mode == "min" else "higher"
    ranked = sorted(known, key=lambda name: (name != "eval/reward", name != "eval/loss", name))
    return next(((name, known[name]) for name in ranked if known[name]), None)


def num_steps(run: RunRecord) -> int:
    """The highest step in the metrics and events."""
    series = (*run.train.values(), *run.eval.values())
    return max((*(max(one.steps) for one in series), *(event.step for event in run.events)), default=0)


def num_skipped(run: RunRecord) -> int:
    """Steps that were skipped: `skipped` counts them from the start of the run."""
    return int(max((value for _, value in _finite(run, "skipped")), default=0))


def seconds(run: RunRecord) -> float:
    """Training time. The clock of a resumed run may start at zero again; the parts are summed."""
    times = [value for _, value in _finite(run, "time/seconds")]
    ends = [before for before, after in pairwise(times) if after < before]
    return sum(ends) + (times[-1] if times else 0.0)


def _finite(run: RunRecord, name: str) -> list[tuple[int, float]]:
    return run.train.get(name, Series(steps=(), values=())).finite()


def _inner_title(name: str) -> str:
    """The title within a sentence: without its capital letter, unless it begins with an abbreviation."""
    text = title(name)
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _now(name: str, run: RunRecord) -> Figure | None:
    """The last value of a training metric, and the first."""
    series = run.train.get(name)
    if series is None:
        return None
    first, last = series.values[0], series.values[-1]
    return Figure(label=title(name), text=number(last), detail=f"from {number(first)}", value=last, goal=goal(name))
