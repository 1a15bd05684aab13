"""SwiGLU and GeGLU in Triton: one pass forward, and one backward that recomputes the activation from the gate.

Both activations are x * s(z(x)) with the sigmoid s: z(x) = x for SiLU, and 2 sqrt(2 / pi) (x + 0.044715 x³) for GELU by
tanh. The gradients are d up = grad * x * s and d gate = grad * up * (s + x * s * (1 - s) * z'(x)).
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.triton.launcher import RepeatedLaunch
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.core.kernels.triton.runtime import Kinds, device_description, kinds_of, quotient_up, repeated_launch

# 2 sqrt(2 / pi), and that times 0.044715.
_LINEAR = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.07135481627260025)
# Elements of a thread.
_PER_THREAD = 8


@triton_op("kitforge::gated")
def gated(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    """`gelu_tanh(gate) * up`, or `silu(gate) * up`."""
    output = gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))
    size = output.numel()
    if size:
        launch = _launch_over(size, kinds_of(gate, up), False, is_gelu)
        launch(gate.contiguous(), up.contiguous(), output)
    return output


@triton_op("kitforge::gated_backward")
def _backward(grad: Tensor, gate: Tensor, up: Tensor, is_gelu: bool) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    size = grad_gate.numel()
    if size:
        launch = _launch_over(size, kinds_of(gate, up, grad), True, is_gelu)
        launch(grad.contiguous(), gate.contiguous(), up.contiguous(), grad_gate, grad_up)
    return grad_gate, grad_up


@functools.lru_cache(maxsize=1024)
def _launch_over(size: int, kinds: Kinds, is_backward: bool, is_gelu: bool) -> RepeatedLaunch:
    """That of an elementwise kernel over contiguous tensors of so many elements."""
    device = kinds[0][1]
    block = device_description(device).tile_elements
    return repeated_launch(
        *(_backward_kernel if is_backward else _forward_kernel, quotient_up(size, block), block, size),
        device=device,
        num_warps=max(block // (32 * _PER_THREAD), 1),
        is_queued=True,
        IS_GELU=is_gelu,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs[:2])
    ctx.is_gelu = inputs[2]


gated.register_fake(lambda gate, up, _: gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype)))
_backward.register_fake(lambda _, gate, up, _gelu: (gate.new_empty(gate.shape), up.new_empty(up.shape)))
gated.register_autograd(
    by_hand()(lambda ctx, grad: (*_backward(grad, *ctx.saved_tensors, ctx.is_gelu), None)), setup_context=_save
)


@triton.jit
def sigmoid(x, IS_GELU: tl.constexpr):
    """s(z(x))."""
    if IS_GELU:
        x = x * (_LINEAR + _CUBIC * x * x)
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _forward_kernel(gate, up, output, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr, IS_GELU: tl.constexpr):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        g = tl.load(gate + offsets, mask=inside, other=0).to(EXACT)
        u = tl.load(up + offsets, mask=inside, other=0).to(EXACT)
        # torch rounds the activation before it multiplies.
        activated = (g * sigmoid(g, IS_GELU)).to(gate.dtype.element_ty).to(EXACT)
        tl.store(output + offsets, (activated * u).to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, gate, up, grad_gate, grad_up, size, steps, BLOCK: tl.constexpr, EXACT: tl.constexpr, IS_GELU: tl.constexpr
):
    for step in range(steps):
        tile = tl.program_id(0).to(tl.int64) + step * tl.num_programs(0)
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < size
        d = tl.load(grad + offsets, mask=inside, other=0).to(EXACT)
        g = tl.load(gate + offsets, mask=inside, other=0).to(EXACT)
        u = tl.load(up + offsets, mask=inside, other=0).to(EXACT)
        s = sigmoid(g, IS_GELU)
        tl.store(grad_up + offsets, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)
        bend = g * s * (1 - s)
        if IS_GELU:
            # Where the sigmoid is flat, its slope may overflow.
            bend = tl.where(bend == 0, 0, bend * (_LINEAR + 3 * _CUBIC * g * g))
        tl.store(grad_gate + offsets, (d * u * (s + bend)).to(grad_gate.dtype.element_ty), mask=inside)
