"""The linear layer."""

from typing import Literal

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.kernels.quantized_linear.frozen import frozen_quantized_linear
from kitforge.core.kernels.quantized_linear.reference import Blocks, dequantize, quantize
from kitforge.foundation.errors import ModelError

# Features of a row that share a scale in int4, the largest that divides the row; else all of them do.
_GROUPS = (64, 32)


class Linear(nn.Module):
    """`input [..., in_dim] -> [..., out_dim]`, computed by the kernels that the model was built with."""

    def __init__(self, in_dim: int, out_dim: int, *, bias: bool, kernels: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        self.scales: nn.Parameter | None = None  # of a frozen quantized weight, [out_dim, groups]
        self._kernels = kernels
        self._linear = kernels.linear
        self.is_float8 = False

    def forward(self, input: Tensor) -> Tensor:
        """`input @ weight.T + bias`, in autocast's dtype where autocast is on."""
        return self._linear(input, self.weight, self.bias) if self.scales is None else self._frozen(input, self.bias)

    def use_float8(self) -> None:
        """Multiply in FP8 from now on, where matrix units can: both dims must be multiples of 16."""
        if all(size % 16 == 0 for size in self.weight.shape):
            self._linear, self.is_float8 = self._kernels.float8_linear, True

    def without_bias(self, input: Tensor) -> Tensor:
        """`input @ weight.T`, for tensor parallelism, which adds the bias after its reduction."""
        return self._linear(input, self.weight, None) if self.scales is None else self._frozen(input, None)

    def quantize(self, bits: Literal[4, 8]) -> None:
        """Replace the weight by whole numbers and scales, which stay as they are: int8 with a scale for each row, or
        pairs of int4 in a byte with one for each group of features. Raises ModelError if it is quantized already."""
        if self.scales is not None:
            raise ModelError("a linear layer is quantized already", expected="weights in floating point")
        self.keep(Blocks(*quantize_weight(self.weight, bits)))

    def keep(self, blocks: Blocks) -> None:
        """Replace the weight by a quantized one, which stays as it is."""
        self.weight = nn.Parameter(blocks.whole, requires_grad=False)
        self.scales = nn.Parameter(blocks.scales, requires_grad=False)

    def dense_weight(self) -> Tensor:
        """The weight [out_dim, in_dim] in floating point; of a quantized layer a new tensor."""
        return self.weight if self.scales is None else dequantize(self.weight, self.scales)

    @property
    def shape(self) -> tuple[int, int]:
        """[out_dim, in_dim], also of a quantized weight."""
        return (*self.weight.shape,) if self.scales is None else Blocks(self.weight, self.scales).shape

    def _frozen(self, input: Tensor, bias: Tensor | None) -> Tensor:
        assert self.scales is not None
        input = input.to(compute_dtype(input))
        return frozen_quantized_linear(self._kernels.quantized_linear, input, self.weight, self.scales, bias)


def quantize_weight(weight: Tensor, bits: Literal[4, 8]) -> tuple[Tensor, Tensor]:
    """The whole numbers and scales that `Linear.quantize` keeps of a weight [out_dim, in_dim]."""
    features = weight.shape[1]
    if bits == 8 or features % 2:
        return quantize(weight, 8)
    return quantize(weight, 4, next((each for each in _GROUPS if features % each == 0), None))
