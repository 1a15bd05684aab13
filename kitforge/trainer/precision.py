"""Mixed precision: autocast around the forward pass, and a loss scale for fp16."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from kitforge.core.nn.linear import Linear
from kitforge.foundation import device as devices
from kitforge.foundation.dtype import DTYPES, Precision

GROWTH_INTERVAL = 2000
MAX_SCALE = 2.0**24


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """The autocast context of a forward pass; weights stay fp32."""
    if precision == "fp32":
        return nullcontext()
    # The autocast cache would keep a rounded copy of every weight, gathered ones included, until the pass ends.
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


def use_precision(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """With "fp8", let the linear layers of the model multiply in FP8; the head and the adapters keep bf16.

    Raises DeviceError for a device without FP8 products.
    """
    if precision != "fp8":
        return
    devices.check_float8(device)
    for module in model.modules():
        if isinstance(module, Linear):
            module.use_float8()


class GradScaler:
    """Dynamic loss scale for fp16: doubled after 2000 finite steps, halved after a non-finite one, at least 1. Always 1
    in fp32 and bf16."""

    def __init__(self, precision: Precision) -> None:
        self.enabled = precision == "fp16"
        self.scale = 2.0**16 if self.enabled else 1.0
        self._good_steps = 0

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step."""
        if not self.enabled:
            return
        self._good_steps = self._good_steps + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
        elif self._good_steps == GROWTH_INTERVAL:
            self.scale, self._good_steps = min(self.scale * 2, MAX_SCALE), 0

    def state(self) -> dict[str, float]:
        """State for a checkpoint; empty in fp32 and bf16."""
        return {"scale": self.scale, "good_steps": self._good_steps} if self.enabled else {}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore `state`; a run with another precision starts with a new scale."""
        if not (self.enabled and state):
            return
        self.scale, self._good_steps = state["scale"], int(state["good_steps"])
