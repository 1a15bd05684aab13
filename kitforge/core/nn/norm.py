"""Normalisation over the last dim."""

from __future__ import annotations

from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.kernels.mixed_precision import compute_dtype

NormKind = Literal["rms", "layer"]


@final
class Norm(nn.Module):
    """RMSNorm (a weight) or LayerNorm (a weight and a bias) over the last dim [..., dim]."""

    def __init__(self, kind: NormKind, dim: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if kind == "layer" else None
        self._rms_norm = kernels.rms_norm

    def forward(self, input: Tensor) -> Tensor:
        """Normalized input, in autocast's dtype where autocast is on: the layers that use it share one rounding."""
        if self.bias is None:
            return self._rms_norm(input, self.weight.to(input.dtype), self.eps).to(compute_dtype(input))
        shape, dtype = (input.shape[-1],), input.dtype
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        # Entering the autocast context costs more than the norm of a single token.
        if not torch.is_autocast_enabled(input.device.type):
            return functional.layer_norm(input, shape, weight, bias, self.eps)
        with torch.autocast(input.device.type, enabled=False):
            normal = functional.layer_norm(input, shape, weight, bias, self.eps)
        return normal.to(compute_dtype(input))
