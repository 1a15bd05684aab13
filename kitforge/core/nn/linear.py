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
        self._linear = kernels.linear

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, in autocast's dtype where autocast is on."""
        return self._linear(input, self.weight, self.bias)

    def without_bias(self, input: Tensor) -> Tensor:
        """`input @ weight.T`, for tensor parallelism, which adds the bias after its reduction."""
        return self._linear(input, self.weight, None)
