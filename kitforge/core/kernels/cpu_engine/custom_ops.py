"""Custom ops of the compiled loops on CPU, as torch.compile and FakeTensor see them.

A compiled loop reads memory by address, which a traced or a fake tensor does not have. Eager calls go to the loop
directly, since a `torch.library.custom_op` around it takes four times as long for the norm of a token; traced and fake
calls go to the operator `kitforge::NAME_numba`, whose gradients are those of the reference. Triton implementations are
custom ops in their own files. The loops over rows of embedding tables run outside of graphs and have none.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_traced(inputs: tuple[object, ...]) -> bool:
    """Whether torch.compile traces the caller, or an input is a tensor without memory."""
    return torch.compiler.is_compiling() or FakeTensor in map(type, inputs)


def custom_op_of(reference: Callable[..., Tensor], schema: str, like: Callable[..., Tensor]) -> Any:
    """The custom op of an operation's loop, which the first call imports; `like` gives an empty output."""
    operation = reference.__name__

    def run(*inputs: Any, **options: Any) -> Any:
        loop = getattr(importlib.import_module(f"kitforge.core.kernels.{operation}.numba"), operation)
        return loop(*inputs, **options)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor, keyword_only_inputs: Any = None) -> None:
        del output
        ctx.save_for_backward(*(each if torch.is_tensor(each) else None for each in inputs))
        ctx.numbers = [None if torch.is_tensor(each) else each for each in inputs]
        ctx.options = keyword_only_inputs or {}

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [index for index, is_wanted in enumerate(ctx.needs_input_grad) if is_wanted]
        inputs = [
            number if tensor is None else tensor.detach().requires_grad_(index in wanted)
            for index, (tensor, number) in enumerate(zip(ctx.saved_tensors, ctx.numbers, strict=True))
        ]
        with torch.enable_grad():
            output = reference(*inputs, **ctx.options)
        found = torch.autograd.grad(output, [inputs[index] for index in wanted], grad)
        by_index = dict(zip(wanted, found, strict=True))
        return tuple(by_index.get(index) for index in range(len(inputs)))

    op: Any = torch.library.custom_op(f"kitforge::{operation}_numba", run, mutates_args=(), schema=schema)
    op.register_fake(like)
    op.register_autograd(backward, setup_context=save)
    return op
