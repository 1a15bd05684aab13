"""Second derivatives through backward passes that are written by hand.

torch's `once_differentiable` returns constants unless the incoming gradient requires one, and that of a loss is 1: the
curvature of the loss is dropped without a word. Here a graph of gradients is right, or refused where it is asked for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError

Backward = TypeVar("Backward", bound=Callable[..., Any])
# Of the context of a forward pass: its first inputs as they were given, and their function in differentiable
# operations; None where there is no such function.
Again = Callable[[Any], tuple[Sequence[Tensor], Callable[..., Any]] | None]
_FIX = "take compile_level=O0 on one rank, or call backward without create_graph"


def by_hand(
    again: Again = lambda _: None, *, fix: str = _FIX, where: Callable[[Any], bool] = lambda _: True
) -> Callable[[Backward], Backward]:
    """A decorator of the backward pass of an `autograd.Function`, which runs without a graph and without autocast.

    With `create_graph=True` the gradients are those of the function that `again` returns, so they can be differentiated
    themselves; ModelError if there is none, if an input was not saved as it was given, or if inputs differ in dtype.
    `where` is False of a context whose gradients leave autograd, as those of the rows of a table do.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *gradients: Any) -> Any:
            # A compiled graph has no second derivative, which torch says itself.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not where(ctx):
                with torch.no_grad():
                    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
                        return backward(ctx, *gradients)
                    # A training loop may call `backward` within autocast, which would round products and losses.
                    device = next((each.device.type for each in gradients if isinstance(each, Tensor)), "cpu")
                    with torch.autocast(device, enabled=False):
                        return backward(ctx, *gradients)
            found, wanted = again(ctx), [index for index, is_wanted in enumerate(ctx.needs_input_grad) if is_wanted]
            # Inputs of several dtypes were joined by autocast, which has ended.
            is_given = found is not None and all(found[0][index].requires_grad for index in wanted)
            if found is None or not is_given or len({each.dtype for each in found[0]}) > 1:
                raise ModelError("this operation has no second derivative", got="create_graph=True", fix=fix)
            # Tensors of their own, since one input may have been computed from another.
            inputs = [each.view_as(each) for each in found[0]]
            sources = [inputs[index] for index in wanted]
            results = torch.autograd.grad(found[1](*inputs), sources, gradients, create_graph=True)
            by_index = dict(zip(wanted, results, strict=True))
            return tuple(by_index.get(index) for index in range(len(ctx.needs_input_grad)))

        return cast(Backward, run)

    return decorate
