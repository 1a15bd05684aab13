"""Reads a run folder into a RunRecord.

Damage (a torn line, a missing file) is listed in `problems` instead of raised: failed runs need a report most.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kitforge.foundation.errors import DataError
from kitforge.foundation.untrusted import parse_json

KINDS = ("train", "eval", "event")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric over the steps, in file order. Values may be nan or infinite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def finite(self) -> list[tuple[int, float]]:
        """The pairs (step, value) whose value is finite."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedEvent:
    """An event at a step: a skip, rollback, resume, interruption, checkpoint."""

    step: int
    name: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt, its completion, and numbers about the completion by name."""

    prompt: str
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSet:
    """The samples drawn at one step."""

    step: int
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The content of a run folder. Series are keyed by the metric's name as logged ("loss", "eval/loss")."""

    name: str
    folder: Path
    config_text: str
    train: Mapping[str, Series]
    eval: Mapping[str, Series]
    events: tuple[LoggedEvent, ...]
    samples: tuple[SampleSet, ...]
    problems: tuple[str, ...]  # sentences about what could not be read
    # The metric that selects the weights, and whether the smallest or the largest is best ("min", "max").
    metric_for_best: tuple[str, str] | None = None
    weights_of_step: int | None = None  # the step whose weights are the result, if it is not the last one


def read_run(folder: Path) -> RunRecord:
    """Read the run in `folder`. Raises DataError if the folder is absent or holds no run."""
    if not folder.is_dir():
        raise DataError("no such run", got=folder, expected="a run folder", fix="look into runs/, or try runs/latest")
    config, metrics = folder / "config.yaml", folder / "metrics.jsonl"
    if not config.is_file() and not metrics.is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "an empty folder"
        raise DataError(
            f"{str(folder)!r} holds no run",
            got=found,
            expected="config.yaml and metrics.jsonl",
            fix="name the folder that a training run wrote",
        )
    problems = [f"{path.name} is missing." for path in (config, metrics) if not path.is_file()]
    lines = _MetricLines(problems)
    if metrics.is_file():
        lines.read(metrics)
    return RunRecord(
        name=folder.resolve().name,
        folder=folder,
        config_text=_read_config(config, problems) if config.is_file() else "",
        train=_freeze(lines.series["train"]),
        eval=_freeze(lines.series["eval"]),
        events=tuple(lines.events),
        samples=tuple(_read_samples(folder / "samples", problems)),
        problems=tuple(problems),
        metric_for_best=lines.metric_for_best,
        weights_of_step=lines.weights_of_step,
    )


class _MetricLines:
    """Sorts the lines of metrics.jsonl into series and events as they come."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        self.series: dict[str, dict[str, tuple[list[int], list[float]]]] = {"train": {}, "eval": {}}
        self.events: list[LoggedEvent] = []
        self.metric_for_best: tuple[str, str] | None = None
        self.weights_of_step: int | None = None
        self._texts: set[str] = set()

    def read(self, path: Path) -> None:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    self._read_line(line, f"{path.name} line {number}")

    def _read_line(self, line: bytes, location: str) -> None:
        try:
            record = parse_json(line)
        except ValueError:
            # Only the line that was being written when the run was killed lacks its newline.
            reason = "is not JSON" if line.endswith(b"\n") else "is torn: the run was stopped while writing it"
            self.problems.append(f"{location} {reason}. It is left out.")
            return
        problem = _fault(record)
        if problem:
            self.problems.append(f"{location} {problem}. It is left out.")
        elif record["kind"] == "event":
            message = str(record.get("message", ""))
            self.events.append(LoggedEvent(step=record["step"], name=record["event"], message=message))
            if record["event"] == "run":
                self.metric_for_best = str(record.get("metric_for_best")), str(record.get("metric_for_best_mode"))
            if record["event"] in ("run", "restore"):
                kept = record.get("weights_of_step")
                self.weights_of_step = kept if isinstance(kept, int) else None
        else:
            self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        series = self.series[record["kind"]]
        for name, value in record.items():
            if name in ("kind", "step"):
                continue
            if value is not None and not isinstance(value, (bool, int, float)):
                if name not in self._texts:
                    self._texts.add(name)
                    self.problems.append(f"The metric {name!r} holds values that are no numbers. They are not drawn.")
                continue
            steps, values = series.setdefault(name, ([], []))
            steps.append(record["step"])
            values.append(_number(value))


def _fault(record: object) -> str | None:
    """Why a line of JSON cannot be used, or None."""
    if not isinstance(record, dict):
        return "is not an object"
    kind, step = record.get("kind"), record.get("step")
    if kind not in KINDS:
        return f"has the kind {kind!r}, which is none of {', '.join(KINDS)}"
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**48:
        return f"has no step that counts ({step!r})"
    if kind == "event" and not isinstance(record.get("event"), str):
        return "is an event without a name"
    return None


def _number(value: float | None) -> float:
    if value is None:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _freeze(series: dict[str, tuple[list[int], list[float]]]) -> dict[str, Series]:
    return {name: Series(steps=tuple(steps), values=tuple(values)) for name, (steps, values) in series.items()}


def _read_config(path: Path, problems: list[str]) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        problems.append(f"{path.name} is not UTF-8. What could not be read stands as \N{REPLACEMENT CHARACTER}.")
        return data.decode("utf-8", errors="replace")


def _read_samples(folder: Path, problems: list[str]) -> list[SampleSet]:
    """Every sample file, the latest step first."""
    found = []
    for path in folder.glob("step_*.json"):
        try:
            # Half a surrogate pair, of text cut between the halves of a character, is replaced by the page.
            record = json.loads(path.read_bytes())
            samples = tuple(_sample(entry) for entry in record["samples"])
            found.append(SampleSet(step=int(record["step"]), samples=samples))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            problems.append(f"samples/{path.name} cannot be read. It is left out.")
    return sorted(found, key=lambda samples: samples.step, reverse=True)


def _sample(entry: Mapping[str, Any]) -> Sample:
    figures = {str(name): _number(value) for name, value in entry.get("figures", {}).items()}
    return Sample(prompt=str(entry["prompt"]), text=str(entry["text"]), figures=figures)
