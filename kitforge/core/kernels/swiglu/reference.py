"""The definition of `swiglu`."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return functional.silu(gate) * up
