"""`layer_norm` by the norm kernels in Triton."""

from torch import Tensor

from kitforge.core.kernels.triton.norm import norm


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    result: Tensor = norm(input, weight, bias, eps)[0]
    return result
