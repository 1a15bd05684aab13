"""Number formats of a run: autocast around the forward pass, a loss scale for fp16."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from kitforge.foundation.dtype import DTYPES, Precision

GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The context of a forward pass; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    # The cache would keep a rounded copy of every weight until the pass ends, of gathered ones as well.
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


@final
class GradScaler:
    """Keeps fp16 gradients away from underflow: doubles after 2000 good steps, halves after a bad one, never below 1.

    In fp32 and bf16 the scale is 1 for good.
    """

    def __init__(self, precision: Precision) -> None:
        self.enabled = precision == "fp16"
        self.scale = 2.0**16 if self.enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Take note of a step's outcome."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self._good_steps == GROWTH_INTERVAL:
            self.scale, self._good_steps = min(self.scale * 2, MAX_SCALE), 0

    def state(self) -> dict[str, float]:
        """What a resume needs: nothing in fp32 and bf16."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}

    def load_state(self, state: dict[str, float]) -> None:
        """Take back what `state` gave; a run that changes its precision begins with a scale of its own."""
        if not (self.enabled and state):
            return
        self.scale, self._good_steps = state["scale"], int(state["good_steps"])
