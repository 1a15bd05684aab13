"""The MLP of a block."""

import functools
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.linear import Linear
from kitforge.foundation.config import check_counts

MLPKind: TypeAlias = Literal["gelu_tanh", "gelu", "quick_gelu", "relu", "swiglu", "geglu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Width and activation of an MLP."""

    dim: int
    hidden_dim: int
    kind: MLPKind
    bias: bool = False

    def __post_init__(self) -> None:
        check_counts("model", {"dim": self.dim, "mlp_dim": self.hidden_dim})


class MLP(nn.Module):
    """`down(activation(up(x)))`, with a gate (SwiGLU, GeGLU) `down(activation(gate(x)) * up(x))`, over [..., dim]."""

    def __init__(self, config: MLPConfig, kernels: Kernels) -> None:
        super().__init__()
        linear = functools.partial(Linear, bias=config.bias, kernels=kernels)
        self.gate = linear(config.dim, config.hidden_dim) if config.kind in ("swiglu", "geglu") else None
        self.up = linear(config.dim, config.hidden_dim)
        self.down = linear(config.hidden_dim, config.dim)
        self.kind = config.kind
        self._gated = kernels.geglu if config.kind == "geglu" else kernels.swiglu

    def forward(self, input: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]."""
        if self.gate is not None:
            hidden: Tensor = self._gated(self.gate(input), self.up(input))
        elif self.kind == "relu":
            hidden = functional.relu(self.up(input))
        elif self.kind == "quick_gelu":  # the approximation of Hendrycks and Gimpel (2016)
            hidden = self.up(input)
            hidden = hidden * torch.sigmoid(1.702 * hidden)
        else:
            hidden = functional.gelu(self.up(input), approximate="tanh" if self.kind == "gelu_tanh" else "none")
        output: Tensor = self.down(hidden)
        return output
