"""The gradients of weights apart from those of inputs, so that a rank computes them while it would wait; and linear
layers that keep no weight in half precision from their forward pass, of which a stage has several under way.

Knows no order of passes. What is not the product of a linear layer or of experts, as a norm, an embedding or the head's
loss, has its gradient in the pass of the inputs.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES, compute_dtype, storage_dtype
from kitforge.core.kernels.autograd.recomputation import kept
from kitforge.core.kernels.grouped_linear.fused import grouped_linear_backward
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.moe import Experts
from kitforge.foundation.errors import TrainingError

Key = tuple[int, int]  # stage, micro-batch


class WeightGradients:
    """A queue of products by stage and micro-batch, each with the parameters whose gradients it gives."""

    def __init__(self, model: nn.Module, *, is_deferred: bool = True) -> None:
        """For the linear layers and experts of a model. Without `is_deferred` nothing waits: gradients of weights come
        in the pass of the inputs."""
        self.is_deferred, self.is_scheduled = is_deferred, False
        self.key: Key = (0, 0)  # of the backward pass that runs
        self._waiting: dict[Key, list[tuple[Sequence[Tensor], Callable[[], Sequence[Tensor]]]]] = {}
        for module in model.modules():
            if isinstance(module, Linear):
                module.__dict__["_linear"] = partial(self._product, _Linear, module._linear)
            elif isinstance(module, Experts):
                product = partial(self._product, _GroupedLinear, module.kernels.grouped_linear)
                module.kernels = dataclasses.replace(module.kernels, grouped_linear=product)

    def put(self, parameters: Sequence[Tensor], gradients: Callable[[], Sequence[Tensor]]) -> None:
        """Leave the gradients of parameters for `run`."""
        self._waiting.setdefault(self.key, []).append((parameters, gradients))

    def run(self, stage: int, micro_batch: int) -> None:
        """Add the gradients that a micro-batch has left in a stage."""
        for parameters, gradients in self._waiting.pop((stage, micro_batch), ()):
            torch.autograd.backward(parameters, gradients())

    def check_empty(self) -> None:
        """Raise TrainingError if gradients wait for a pass that does not come."""
        if self._waiting:
            left = ", ".join(f"stage {stage} micro-batch {number}" for stage, number in self._waiting)
            self._waiting.clear()
            raise TrainingError("gradients of weights are left at the end of a step", got=left, expected="none")

    def _product(
        self, function: Any, kernel: Callable[..., Tensor], input: Tensor, weight: Tensor, *more: Any
    ) -> Tensor:
        # torch's product would keep its own copy of the weight, in the dtype of the product.
        casts = storage_dtype(input) is None and compute_dtype(input) is not weight.dtype
        is_kept = self.is_deferred or (function is _Linear and casts)
        if not (is_kept and self.is_scheduled and weight.requires_grad and torch.is_grad_enabled()):
            return kernel(input, weight, *more)
        product: Tensor = function.apply(self, kernel, input, weight, *more)
        return product


class _Linear(torch.autograd.Function):
    """`LinearKernel` in plain products; the input is saved in the dtype of the output."""

    @staticmethod
    def forward(
        ctx: Any, queue: WeightGradients, _kernel: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        # The parameters themselves: under FSDP those that are gathered, whose gradients it reduces.
        ctx.queue, ctx.weight, ctx.bias, ctx.dtype = queue, weight, bias, input.dtype
        rows = input.to(compute_dtype(input))
        ctx.save_for_backward(rows)
        return kept(_linear, rows, weight, bias)

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), weight, bias = ctx.saved_tensors, ctx.weight, ctx.bias
        trained = [each for each in (weight, bias) if each is not None and each.requires_grad]

        def gradients() -> list[Tensor]:
            columns = _exact(grad).reshape(-1, len(weight)).t()
            found = [columns @ _exact(rows).reshape(-1, rows.shape[-1])]
            if len(trained) > 1:
                found.append(columns.sum(1))
            return [each.to(own.dtype) for each, own in zip(found, trained, strict=True)]

        exact = _exact(grad)
        grad_input = (exact @ weight.to(exact.dtype)).to(ctx.dtype) if ctx.needs_input_grad[2] else None
        if ctx.queue.is_deferred:
            ctx.queue.put(trained, gradients)
            return None, None, grad_input, None, None
        return None, None, grad_input, *(*gradients(), None)[:2]


class _GroupedLinear(torch.autograd.Function):
    """See `GroupedLinearKernel`."""

    @staticmethod
    def forward(
        ctx: Any, queue: WeightGradients, kernel: Callable[..., Tensor], input: Tensor, weight: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.queue, ctx.weight, ctx.dtype = queue, weight, input.dtype
        rows = input.to(compute_dtype(input))
        ctx.save_for_backward(rows, ends)
        return kernel(rows, weight, ends)

    @staticmethod
    @by_hand()
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, ends), weight, grad = ctx.saved_tensors, ctx.weight, grad.contiguous()
        ctx.queue.put([weight], lambda: [grouped_linear_backward(grad, rows, weight, ends, False, True)[1]])
        if not ctx.needs_input_grad[2]:
            return None, None, None, None, None
        grad_input = grouped_linear_backward(grad, rows, weight, ends, True, False)[0]
        return None, None, grad_input.to(ctx.dtype), None, None


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    exact = _exact(rows)
    with torch.autocast(rows.device.type, enabled=False):
        shift = None if bias is None else bias.to(exact.dtype)
        return functional.linear(exact, weight.to(exact.dtype), shift).to(rows.dtype)


def _exact(rows: Tensor) -> Tensor:
    """In fp32 where the processor has no products in the dtype."""
    is_slow = rows.is_cpu and not NATIVE_DTYPES.get(rows.dtype, True)
    return rows.float() if is_slow else rows
