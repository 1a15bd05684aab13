"""Normalization over the last dim."""

from typing import Literal

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.dispatch import Kernels

NormKind = Literal["rms", "layer"]


class Norm(nn.Module):
    """RMSNorm (a weight) or LayerNorm (a weight and a bias) over the last dim [..., dim]."""

    def __init__(self, kind: NormKind, dim: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if kind == "layer" else None
        self._kernels = kernels

    def forward(self, input: Tensor) -> Tensor:
        """Normalized input, in autocast's dtype where autocast is on: the layers that use it share one rounding."""
        return self.unrounded(input).to(compute_dtype(input))

    def unrounded(self, input: Tensor) -> Tensor:
        """Normalized input in its own dtype."""
        # Within a network in half precision a weight in fp32 stays exact.
        if self.weight.dtype.itemsize > input.dtype.itemsize and not torch.is_autocast_enabled(input.device.type):
            return self.unrounded(input.to(self.weight.dtype)).to(input.dtype)
        weight = self.weight.to(input.dtype)
        if self.bias is None:
            return self._kernels.rms_norm(input, weight, self.eps)
        return self._kernels.layer_norm(input, weight, self.bias.to(input.dtype), self.eps)

    def add(self, input: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """The residual connection before the norm: `input + branch`, and that sum normalized as by `forward`."""
        if self._kernels.add_norm is None or self.weight.dtype.itemsize > input.dtype.itemsize:
            total = input + branch
            return total, self(total)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        total, normal = self._kernels.add_norm(input, branch, self.weight.to(input.dtype), bias, self.eps)
        return total, normal.to(compute_dtype(input))
