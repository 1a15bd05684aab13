"""The linear layer."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels


@final
class Linear(nn.Module):
    """`input [..., in_dim] -> [..., out_dim]`, computed by the kernels that the model was built with."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        self._kernels = kernels
        self._linear = kernels.linear
        self.is_float8 = False

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, in autocast's dtype where autocast is on."""
        return self._linear(input, self.weight, self.bias)

    def use_float8(self) -> None:
        """Multiply in FP8 from now on, where matrix units can: both dims must be multiples of 16."""
        if all(size % 16 == 0 for size in self.weight.shape):
            self._linear, self.is_float8 = self._kernels.float8_linear, True

    def without_bias(self, input: Tensor) -> Tensor:
        """`input @ weight.T`, for tensor parallelism, which adds the bias after its reduction."""
        return self._linear(input, self.weight, None)
