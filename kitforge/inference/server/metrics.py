"""Counts of a server as Prometheus reads them (https://prometheus.io/docs/instrumenting/exposition_formats/)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

# Upper ends in seconds.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Histogram:
    """How many durations were no longer than each of the bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str) -> list[str]:
        """The histogram as text."""
        found, below = [], 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            below += count
            found.append(f'{name}_bucket{{le="{bound}"}} {below}')
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {below}"]


@dataclass(slots=True, kw_only=True)
class Metrics:
    """What a server has done since it was started."""

    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    cancelled: int = 0  # answers that nobody waited for any more
    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token: Histogram = field(default_factory=Histogram)
    duration: Histogram = field(default_factory=Histogram)

    def text(self, gauges: Mapping[str, int]) -> str:
        """Everything, with the engine's counts of the moment."""
        lines = [
            "# HELP kitforge_requests_total Requests by path and status.",
            "# TYPE kitforge_requests_total counter",
        ]
        lines += [
            f'kitforge_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(self.answers.items())
        ]
        for name, words, value in (
            ("cancelled_total", "Answers that nobody waited for any more.", self.cancelled),
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "Tokens made.", self.generated_tokens),
        ):
            lines += _single(f"kitforge_{name}", words, "counter", value)
        for name, value in gauges.items():
            lines += _single(f"kitforge_engine_{name}", f"Of the engine: {name.replace('_', ' ')}.", "gauge", value)
        for name, words, histogram in (
            ("first_token_seconds", "From a request to its first token.", self.first_token),
            ("request_seconds", "From a request to the end of its answer.", self.duration),
        ):
            lines += [f"# HELP kitforge_{name} {words}", f"# TYPE kitforge_{name} histogram"]
            lines += histogram.lines(f"kitforge_{name}")
        return "\n".join(lines) + "\n"


def _single(name: str, words: str, kind: str, value: int) -> list[str]:
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}", f"{name} {value}"]
