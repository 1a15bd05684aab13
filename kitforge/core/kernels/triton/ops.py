"""Custom ops of the Triton kernels and of what torch computes around them, which eager calls go around.

torch.compile, FakeTensor and dispatch modes need an operator. An eager call does not, and the operator costs more than
the launch of a kernel: the dispatcher, a schema, and autograd by a function that torch generates. Eager calls run the
function itself, below one `torch.autograd.Function` where gradients are on.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Types of arguments that no subclass of a tensor hides behind.
_PLAIN = frozenset({Tensor, torch.nn.Parameter, type(None), int, float, bool, torch.dtype})
_num_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active


class TritonOp:
    """A function of tensors as the operator `op`, and as itself in eager calls; arguments are positional."""

    def __init__(self, name: str, function: Callable[..., Any], mutates: tuple[str, ...]) -> None:
        self.op: Any = torch.library.custom_op(name, function, mutates_args=mutates)
        self._function = function
        self._mutated = [list(inspect.signature(function).parameters).index(each) for each in mutates]
        self._apply: Any = None

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """The shapes and dtypes of the results, found without their memory."""
        self.op.register_fake(fake)
        return fake

    def register_autograd(
        self, backward: Callable[..., Any], *, setup_context: Callable[[Any, tuple[Any, ...], Any], None]
    ) -> None:
        """The gradients. In eager calls the gradient of a result that nothing uses is None."""
        self.op.register_autograd(backward, setup_context=setup_context)
        function = self._function

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = function(*inputs)
            ctx.set_materialize_grads(False)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        node: Any = type(function.__name__, (torch.autograd.Function,), methods)
        # Not `Function.apply`, which first asks of each input what is known here.
        self._apply = super(torch.autograd.Function, node).apply  # type: ignore[misc]

    def __call__(self, *inputs: Any) -> Any:
        """Run it."""
        if torch.compiler.is_compiling() or not _is_eager(inputs):
            return self.op(*inputs)
        if torch.is_grad_enabled():
            if self._apply is not None:
                return self._apply(*inputs)
            # The operator raises the error that there are no gradients.
            if any(each.requires_grad for each in inputs if isinstance(each, Tensor)):
                return self.op(*inputs)
        result = self._function(*inputs)
        for index in self._mutated:
            torch.autograd.graph.increment_version(inputs[index])
        return result


def triton_op(name: str, *, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], TritonOp]:
    """A decorator like `torch.library.custom_op`."""
    return lambda function: TritonOp(name, function, mutates_args)


def _is_eager(inputs: tuple[Any, ...]) -> bool:
    """Whether all tensors have memory, and nothing watches operators."""
    return _PLAIN.issuperset(map(type, inputs)) and not _num_modes() and not _is_transformed()
