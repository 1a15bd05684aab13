"""`grouped_linear` as one custom op: a product for each expert, written into one output, or on CUDA `F.grouped_mm`.

`F.grouped_mm` takes rows of a multiple of 16 bytes and leaves rows past the last end without values. Outside of
bfloat16 on Hopper and Blackwell it is a loop over the experts itself, which reads their ends on the host. On CPU the
loop is as fast, since a product of one expert fills the machine. Kernels of our own in Triton were no faster on an H200
(docs/log.md).
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES, compute_dtype
from kitforge.core.kernels.autograd.recomputation import kept_operations
from kitforge.core.kernels.grouped_linear import reference
from kitforge.core.kernels.triton.ops import triton_op
from kitforge.foundation import device as devices

_GROUPED_MM_CAPABILITIES = (9, 10)  # major, of Hopper and Blackwell


def accepts_grouped_mm(input: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies rows [R, in] and weight [E, out, in] in one kernel of the device. Elsewhere it
    is a loop that waits for the host, or refuses them."""
    if not input.is_cuda or input.dtype is not torch.bfloat16:
        return False
    widths = (input.shape[1] * input.element_size(), weight.shape[1] * input.element_size())
    is_aligned = all(each and each % 16 == 0 for each in widths)
    return is_aligned and devices.compute_capability(input.device)[0] in _GROUPED_MM_CAPABILITIES


def grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """See `GroupedLinearKernel`."""
    return kept_operations(_grouped_linear, input.to(compute_dtype(input)), weight, ends)


@triton_op("kitforge::grouped_linear")
def _grouped_linear(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    if accepts_grouped_mm(input, weight):
        products = functional.grouped_mm(input, weight.to(input.dtype).mT, offs=ends)
        return _clear_past(products, ends)
    output = input.new_empty(len(input), weight.shape[1])
    with torch.autocast(input.device.type, enabled=False):
        for expert, rows in _groups(ends):
            _multiply(input[rows], weight[expert].t(), output[rows])
    output[_num_rows(ends) :] = 0.0
    return output


@triton_op("kitforge::grouped_linear_backward")
def grouped_linear_backward(
    grad: Tensor, input: Tensor, weight: Tensor, ends: Tensor, wants_input: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and weight; empty where they are not wanted."""
    grad_input = input.new_empty(input.shape) if wants_input else input.new_empty(0)
    grad_weight = torch.empty_like(weight) if wants_weight else weight.new_empty(0)
    with torch.autocast(input.device.type, enabled=False):
        if accepts_grouped_mm(input, weight) and accepts_grouped_mm(grad, weight.mT):
            if wants_input:
                grad_input = _clear_past(functional.grouped_mm(grad, weight.to(grad.dtype), offs=ends), ends)
            if wants_weight:
                grad_weight = functional.grouped_mm(grad.t(), input, offs=ends).to(weight.dtype)
            return grad_input, grad_weight
        for expert, rows in _groups(ends):
            if wants_input:
                _multiply(grad[rows], weight[expert], grad_input[rows])
            if wants_weight:
                _multiply(grad[rows].t(), input[rows], grad_weight[expert])  # zero without rows
    if wants_input:
        grad_input[_num_rows(ends) :] = 0.0
    return grad_input, grad_weight


def _multiply(left: Tensor, right: Tensor, output: Tensor) -> None:
    """`left @ right` into `output`, in fp32 where the processor has no products in the dtype of `left`."""
    half = left.is_cpu and not NATIVE_DTYPES.get(left.dtype, True)
    dtype = torch.float32 if half else left.dtype
    if output.dtype is dtype:
        torch.mm(left.to(dtype), right.to(dtype), out=output)
    else:
        output.copy_(left.to(dtype) @ right.to(dtype))


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """The experts and their rows."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        yield expert, slice(start, end)
        start = end


def _num_rows(ends: Tensor) -> int:
    return int(ends[-1]) if len(ends) else 0


def _clear_past(rows: Tensor, ends: Tensor) -> Tensor:
    """The same rows [R, width], with zeros past the last end, written without waiting for the device."""
    if rows.is_cuda and rows.is_contiguous() and _has_triton():
        importlib.import_module("kitforge.core.kernels.triton.moe").zero_past(rows, ends)
        return rows
    return rows.masked_fill_((torch.arange(len(rows), device=rows.device) >= ends[-1]).unsqueeze(1), 0.0)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@_grouped_linear.register_fake
def _(input: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    del ends
    return input.new_empty(len(input), weight.shape[1])


@grouped_linear_backward.register_fake
def _(
    grad: Tensor, input: Tensor, weight: Tensor, ends: Tensor, wants_input: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    del grad, ends
    found = input.new_empty(input.shape) if wants_input else input.new_empty(0)
    return found, weight.new_empty(weight.shape) if wants_weight else weight.new_empty(0)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _again(ctx: Any) -> tuple[tuple[Tensor, ...], Callable[..., Tensor]]:
    input, weight, ends = ctx.saved_tensors
    return (input, weight), lambda input, weight: reference.grouped_linear(input, weight, ends)


@by_hand(_again)
def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    wants_input, wants_weight, _ = ctx.needs_input_grad
    found = grouped_linear_backward(grad.contiguous(), *ctx.saved_tensors, wants_input, wants_weight)
    return found[0] if wants_input else None, found[1] if wants_weight else None, None


_grouped_linear.register_autograd(_backward, setup_context=_save)
