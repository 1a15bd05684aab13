"""`quantized_linear` with a gradient for its input: QLoRA's frozen base weights (Dettmers et al., 2023)."""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.recomputation import kept
from kitforge.core.kernels.quantized_linear.reference import QuantizedLinearKernel, dequantize


def frozen_quantized_linear(
    kernel: QuantizedLinearKernel, input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None = None
) -> Tensor:
    """See `QuantizedLinearKernel`. The backward pass dequantizes the weight again, so none is kept in between; weight
    and bias get no gradient."""
    if not (torch.is_grad_enabled() and input.requires_grad):
        return kept(kernel, input, quantized, scales, bias)
    output: Tensor = _Frozen.apply(kernel, input, quantized, scales, bias)  # type: ignore[no-untyped-call]
    return output


class _Frozen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: QuantizedLinearKernel, input: Tensor, quantized: Tensor, scales: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(quantized, scales)
        return kept(kernel, input, quantized, scales, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None, None]:
        quantized, scales = ctx.saved_tensors
        (gradient,) = gradients
        return None, gradient @ dequantize(quantized, scales).to(gradient.dtype), None, None, None
