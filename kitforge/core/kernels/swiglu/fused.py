"""`swiglu` that saves only its inputs and recomputes the activation in the backward pass.

With s = sigmoid(gate): d up = grad * gate * s; d gate = grad * up * s * (1 + gate * (1 - s)).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd.derivatives import by_hand


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return functional.silu(gate).mul_(up)
    result: Tensor = Gated.apply(gate, up, functional.silu, torch.ops.aten.silu_backward)  # type: ignore[no-untyped-call]
    return result


class Gated(torch.autograd.Function):
    """`activation(gate) * up`; `activation_backward(grad, gate)` is the gradient of the activation."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        activation: Callable[[Tensor], Tensor],
        activation_backward: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.functions = activation, activation_backward
        return activation(gate).mul_(up)

    @staticmethod
    @by_hand(lambda ctx: (ctx.saved_tensors, lambda gate, up: ctx.functions[0](gate) * up))
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gate, up), (activation, activation_backward) = ctx.saved_tensors, ctx.functions
        return activation_backward(grad * up, gate), activation(gate).mul_(grad), None, None
