"""The definition of `add_norm`: the residual connection and the norm after it."""

from typing import Protocol

from torch import Tensor

from kitforge.core.kernels.layer_norm.reference import layer_norm
from kitforge.core.kernels.rms_norm.reference import rms_norm


class AddNormKernel(Protocol):
    """`input + branch` [..., dim] and its norm: LayerNorm, or RMSNorm without a bias. Returns both, the sum first."""

    def __call__(
        self, input: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]: ...


def add_norm(input: Tensor, branch: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    total = input + branch
    return total, rms_norm(total, weight, eps) if bias is None else layer_norm(total, weight, bias, eps)
