"""The definition of `layer_norm`."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LayerNormKernel(Protocol):
    """LayerNorm (Ba et al., 2016) of input [..., dim] with weight and bias [dim], in fp32 at least, in the dtype of the
    input. Autocast does not change the result."""

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    # Entering the autocast context costs more than the norm of a single token.
    if not torch.is_autocast_enabled(input.device.type):
        return functional.layer_norm(input, weight.shape, weight, bias, eps)
    with torch.autocast(input.device.type, enabled=False):
        return functional.layer_norm(input, weight.shape, weight, bias, eps)
