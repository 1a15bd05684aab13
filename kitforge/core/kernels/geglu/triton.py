"""`geglu` by the gated kernels in Triton."""

from torch import Tensor

from kitforge.core.kernels.triton.gated import gated


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    result: Tensor = gated(gate, up, True)
    return result
