"""How much a step away from the reference costs, held fixed or steered towards a target."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

from kitforge.foundation.config import check

MAX_RELATIVE_ERROR = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class KlControllerOptions:
    """The cost of one nat of divergence from the reference."""

    kind: Literal["fixed", "adaptive"] = "fixed"
    coef: float = 0.05  # per nat; where an adaptive one begins
    target: float = 6.0  # nats a sequence that an adaptive coefficient steers to
    horizon: int = 10000  # sequences over which it would double or vanish at the most

    def __post_init__(self) -> None:
        check(self.coef >= 0, "kl.coef", self.coef, "a number of at least 0")
        check(self.target > 0, "kl.target", self.target, "nats a sequence, above 0")
        check(self.horizon > 0, "kl.horizon", self.horizon, "a number of sequences of at least 1")


class KlController(ABC):
    """Holds the coefficient."""

    @property
    @abstractmethod
    def coef(self) -> float:
        """The cost of a nat now."""

    @abstractmethod
    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Take note of what a step has found, over all ranks."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """What a resume needs."""

    @abstractmethod
    def load_state(self, state: dict[str, float]) -> None:
        """Take back what `state` gave."""


@final
class FixedKlController(KlController):
    """Always the same."""

    def __init__(self, options: KlControllerOptions) -> None:
        self._coefficient = options.coef

    @property
    def coef(self) -> float:
        """See `KlController`."""
        return self._coefficient

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """See `KlController`."""

    def state(self) -> dict[str, float]:
        """See `KlController`."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """See `KlController`."""


@final
class AdaptiveKlController(KlController):
    """Proportional control in units of a whole sequence (Ziegler et al., 2019): the relative error, held within
    0.2, moves the coefficient by that share each `horizon` sequences."""

    def __init__(self, options: KlControllerOptions) -> None:
        self._options = options
        self._coefficient = options.coef

    @property
    def coef(self) -> float:
        """See `KlController`."""
        return self._coefficient

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """See `KlController`."""
        error = min(max(kl_per_sequence / self._options.target - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        # A step of more sequences than the horizon could otherwise turn the penalty into a reward.
        self._coefficient *= max(1 + error * num_sequences / self._options.horizon, 0.0)

    def state(self) -> dict[str, float]:
        """See `KlController`."""
        return {"coefficient": self._coefficient}

    def load_state(self, state: dict[str, float]) -> None:
        """See `KlController`."""
        self._coefficient = state["coefficient"]


def kl_controller(options: KlControllerOptions) -> KlController:
    """What the options ask for."""
    return AdaptiveKlController(options) if options.kind == "adaptive" else FixedKlController(options)
