"""`add_norm` by the norm kernels in Triton: the sum is not read again."""

from torch import Tensor

from kitforge.core.kernels.triton.norm import norm_of_sum


def add_norm(input: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    normal, total, _ = norm_of_sum(input, branch, weight, bias, eps)
    return total, normal
