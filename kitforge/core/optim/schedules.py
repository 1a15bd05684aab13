"""Learning rate schedules: pure functions of the step, and the stateful Plateau.

All are factors in [0, 1] of the peak learning rate, which the optimizer has.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kitforge.foundation.config import check
from kitforge.foundation.errors import CheckpointError

# The warmup that nobody chose, as a fraction of all steps.
WARMUP = 0.02
# Plateau: what the rate is multiplied by, and the relative decrease that counts as improvement.
STALE_FACTOR, IMPROVEMENT = 0.5, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate schedule, in fractions of the peak."""

    name: Literal["constant", "linear", "cosine", "wsd", "plateau"] = "cosine"
    # Steps of linear warmup; below 1: that fraction of all steps, rounded. None: WARMUP of them.
    warmup_steps: int | float | None = None
    decay_fraction: float = 0.2  # wsd: the fraction of steps, at the end, in which the rate decays
    final_fraction: float = 0.1  # linear, cosine, wsd: the scale of the last step; plateau: the lowest factor
    plateau_patience: int = 3  # plateau: observations in a row without improvement before the rate is halved

    def __post_init__(self) -> None:
        for name, value in (("decay_fraction", self.decay_fraction), ("final_fraction", self.final_fraction)):
            check(0 <= value <= 1, f"schedule.{name}", value, "a number from 0 to 1")
        steps = self.warmup_steps
        is_number = steps is None or (steps >= 0 and (steps < 1 or steps % 1 == 0))
        check(is_number, "schedule.warmup_steps", steps, "0 or more whole steps, or a fraction below 1 of all")
        check(self.plateau_patience >= 1, "schedule.plateau_patience", self.plateau_patience, "1 or more")


def lr_scale(config: ScheduleConfig, step: int, max_steps: int) -> float:
    """The factor in [0, 1] of the learning rate at `step`, counted from 0, of `max_steps`.

    With w warmup steps, steps 0 .. w-1 have (step + 1) / w: the first is not 0 and step w-1 is the peak. From the
    peak (step 0 without warmup) to the last step, p runs from 0 to 1, and with f = `final_fraction` the scale is

    - constant, plateau: 1 (the factor of a `Plateau` is multiplied on top)
    - linear: f + (1 - f) (1 - p)
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2
    - wsd (warmup, stable, decay): 1, then over the last d = round(decay_fraction * max_steps) steps linearly to f

    so that the last step has f exactly (1 where warmup takes all steps or d = 0). Steps after the last keep its scale.
    WSD is from Hu et al., MiniCPM (arXiv 2404.06395). Raises ConfigError when the warmup is longer than the run.
    """
    asked = WARMUP if config.warmup_steps is None else config.warmup_steps
    warmup = round(asked * max_steps) if asked < 1 else int(asked)
    check(
        warmup <= max_steps,
        "schedule.warmup_steps",
        warmup,
        f"at most the {max_steps} steps of the run",
        "lower it, or name a fraction of them, such as 0.02",
    )
    peak, last = max(warmup - 1, 0), max_steps - 1
    step = min(step, last)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "wsd":
        peak = max(peak, last - round(config.decay_fraction * max_steps))
    done = (step - peak) / (last - peak) if step > peak else 0.0
    match config.name:
        case "constant" | "plateau":
            left = 1.0
        case "linear" | "wsd":
            left = 1.0 - done
        case "cosine":
            left = (1.0 + math.cos(math.pi * done)) / 2
    return config.final_fraction + (1.0 - config.final_fraction) * left


class Plateau:
    """Reduce on plateau: lowers a factor when an observed value, of which less is better, stops improving.

    A value improves if it is below the best by more than `IMPROVEMENT` times the best's magnitude (values may be
    negative); one that is not finite never does. After `plateau_patience` observations in a row without improvement the
    factor is halved, but stays at least `final_fraction`.
    """

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._best: float | None = None
        self._num_stale = 0
        self.factor = 1.0

    def observe(self, value: float) -> float:
        """Take one observation. Returns the factor from now on."""
        if math.isfinite(value) and (self._best is None or value < self._best - IMPROVEMENT * abs(self._best)):
            self._best, self._num_stale = value, 0
            return self.factor
        self._num_stale += 1
        if self._num_stale >= self._config.plateau_patience:
            self._num_stale = 0
            self.factor = max(self.factor * STALE_FACTOR, self._config.final_fraction)
        return self.factor

    def state(self) -> dict[str, Any]:
        """The state for a resume, as JSON values."""
        return {"best": self._best, "num_stale": self._num_stale, "factor": self.factor}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`. Raises CheckpointError for other keys."""
        if set(state) != set(self.state()):
            raise CheckpointError(
                "the plateau schedule's state does not fit", got=sorted(state), expected=[*self.state()]
            )
        self._best, self._num_stale, self.factor = state["best"], state["num_stale"], state["factor"]
