"""The definition of `swiglu`."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class SwiGLUKernel(Protocol):
    """`silu(gate) * up`, elementwise (Shazeer, 2020)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor: ...


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`."""
    return functional.silu(gate) * up
