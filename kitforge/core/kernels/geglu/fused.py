"""`geglu` that saves only its inputs and recomputes the activation in the backward pass."""

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.swiglu.fused import Gated


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _gelu(gate).mul_(up)
    result: Tensor = Gated.apply(gate, up, _gelu, _gelu_backward)  # type: ignore[no-untyped-call]
    return result


def _gelu(gate: Tensor) -> Tensor:
    return functional.gelu(gate, approximate="tanh")


def _gelu_backward(grad: Tensor, gate: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")
    return result
