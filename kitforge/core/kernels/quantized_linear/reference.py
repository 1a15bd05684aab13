"""The definition of `quantized_linear`, and weight-only quantization to int8 and int4.

Weights are quantized symmetrically, with one scale for each row or for each group of features of a row. Activations
stay as they are.
"""

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.foundation.errors import ModelError

# Features that share a scale in int4 on a CPU.
GROUP = 32


class QuantizedLinearKernel(Protocol):
    """`input [..., in] @ weight.T + bias [out]`, in the dtype of the input, of a weight [out, in] in int8 or int4.

    `quantized` holds whole numbers: int8 [out, in], or uint8 [out, in / 2] of two 4-bit numbers in a byte, each plus 8,
    with feature 2i in the lower half. A number is multiplied by its scale: `scales` [out, groups], each of in / groups
    adjacent features.
    """

    def __call__(self, input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None, /) -> Tensor: ...


def quantized_linear(input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `QuantizedLinearKernel`; multiplies with the dequantized weight."""
    weight = dequantize(quantized, scales).to(input.dtype)
    return functional.linear(input, weight, None if bias is None else bias.to(input.dtype))


def quantize(weight: Tensor, bits: Literal[4, 8], group: int | None = None) -> tuple[Tensor, Tensor]:
    """A weight [out, in] as whole numbers and scales; a group is a row unless its number of features is given.

    Raises ModelError where the features do not divide into groups, or for int4 into pairs.
    """
    rows, features = weight.shape
    group = features if group is None else group
    if group < 1 or features % group or (bits == 4 and features % 2):
        raise ModelError("a weight cannot be quantized", got=f"{features} features", expected=f"a multiple of {group}")
    largest = 2 ** (bits - 1) - 1
    parts = weight.detach().to(torch.promote_types(weight.dtype, torch.float32)).view(rows, features // group, group)
    scales = parts.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny) / largest
    whole = (parts / scales.unsqueeze(2)).round().clamp(-largest, largest).view(rows, features)
    if bits == 8:
        return whole.to(torch.int8), scales
    pairs = (whole + 8).to(torch.uint8)
    return pairs[:, ::2] | pairs[:, 1::2] << 4, scales


def dequantize(quantized: Tensor, scales: Tensor) -> Tensor:
    """The weight [out, in] in the dtype of the scales, in fp32 at least."""
    whole, dtype = whole_numbers(quantized), torch.promote_types(scales.dtype, torch.float32)
    rows, features = whole.shape
    parts = whole.view(rows, scales.shape[1], features // scales.shape[1]).to(dtype)
    return (parts * scales.to(dtype).unsqueeze(2)).view(rows, features)


def whole_numbers(quantized: Tensor) -> Tensor:
    """int8 [out, in] of a quantized weight."""
    if quantized.dtype != torch.uint8:
        return quantized
    return torch.stack((quantized & 15, quantized >> 4), dim=2).flatten(1).to(torch.int8) - 8


class Blocks(NamedTuple):
    """A quantized weight [out, in], see `QuantizedLinearKernel`."""

    whole: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, size = self.whole.shape
        return rows, size * (2 if self.whole.dtype == torch.uint8 else 1)
