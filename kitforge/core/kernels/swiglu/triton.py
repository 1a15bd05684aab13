"""`swiglu` by the gated kernels in Triton."""

from torch import Tensor

from kitforge.core.kernels.triton.gated import gated


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = gated(gate, up, False)
    return result
