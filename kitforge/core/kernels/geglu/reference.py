"""The definition of `geglu`."""

from typing import Protocol

from torch import Tensor
from torch.nn import functional


class GeGLUKernel(Protocol):
    """`gelu(gate) * up`, elementwise, with GELU by tanh (Shazeer, 2020; T5 v1.1, Gemma)."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor: ...


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`."""
    return functional.gelu(gate, approximate="tanh") * up
