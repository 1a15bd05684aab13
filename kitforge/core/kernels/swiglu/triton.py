"""`swiglu` in Triton: one pass forward, and one backward that recomputes the sigmoid from the gate.

With s = sigmoid(gate): d up = grad * gate * s; d gate = grad * up * s * (1 + gate * (1 - s)).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.triton_runtime import describe, launch


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See `SwiGLUKernel`."""
    result: Tensor = _forward(gate, up)
    return result


@torch.library.custom_op("kitforge::swiglu", mutates_args=())
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    output = torch.empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype), device=gate.device)
    _launch(_forward_kernel, gate, up, output)
    return output


@torch.library.custom_op("kitforge::swiglu_backward", mutates_args=())
def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up."""
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(_backward_kernel, grad, gate, up, grad_gate, grad_up)
    return grad_gate, grad_up


def _launch(kernel: Any, *tensors: Tensor) -> None:
    """Run an elementwise kernel over contiguous tensors of one shape; it writes the last of them."""
    size, block = tensors[0].numel(), describe(tensors[0].device).tile_elements
    if size:
        launch(kernel, triton.cdiv(size, block), block, *(each.contiguous() for each in tensors), size)


_forward.register_fake(
    lambda gate, up: gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype)),
)
_backward.register_fake(lambda _, gate, up: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
_forward.register_autograd(
    lambda ctx, grad: _backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),  # noqa: ARG005 (torch names them)
)


@triton.jit
def _forward_kernel(gate, up, output, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        g = tl.load(gate + offsets, mask=inside, other=0).to(EXACT)
        u = tl.load(up + offsets, mask=inside, other=0).to(EXACT)
        # torch rounds silu(gate) before it multiplies.
        activated = (g / (1 + tl.exp(-g))).to(gate.dtype.element_ty).to(EXACT)
        tl.store(output + offsets, (activated * u).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, grad_gate, grad_up, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        d = tl.load(grad + offsets, mask=inside, other=0).to(EXACT)
        g = tl.load(gate + offsets, mask=inside, other=0).to(EXACT)
        u = tl.load(up + offsets, mask=inside, other=0).to(EXACT)
        s = 1 / (1 + tl.exp(-g))
        tl.store(grad_up + offsets, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
        result = d * u * s * (1 + g * (1 - s))
        tl.store(grad_gate + offsets, result.to(grad_gate.dtype.element_ty), mask=inside)
