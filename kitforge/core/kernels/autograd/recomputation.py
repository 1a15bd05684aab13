"""Selective activation recomputation: the backward pass computes a block again, all but the results kept here.

Kept are the results of linear layers, dense and of experts, of fused attention and of reductions over ranks: nearly
all of the arithmetic, for memory that grows with the number of tokens. Computed again are norms, rotations,
activations, routing, dropout and attention that writes out its scores (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022).

The kernels say what is kept. torch's `create_selective_checkpoint_contexts` watches every operation instead, and fails
where a recomputation runs others than the forward pass did, as the hooks of nested FSDP units do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kitforge.foundation.errors import ModelError

# What the backward pass computes again: nothing, all but the kept results, or all.
Recompute = Literal["none", "selective", "full"]

# The operations within torch's own functions for linear layers and attention that do the arithmetic.
KEPT_OPERATIONS = frozenset({
    "aten::mm",
    "aten::addmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
    "kitforge::grouped_linear",
})  # fmt: skip


class _Local(threading.local):
    """The pass that runs in this thread: a device has a thread of its own for its backward pass."""

    current: _Pass | None = None


_local = _Local()


def kept(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, which autograd does not differentiate, as in the forward pass of an `autograd.Function`."""
    current = None if torch.compiler.is_compiling() else _local.current
    if current is None or not current.keeps:
        return function(*inputs)
    name = getattr(function, "__name__", type(function).__name__)
    result: Tensor = current.result(name, partial(function, *inputs))
    return result


def kept_operations(function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`function(*inputs)`, one of torch's differentiable functions for linear layers and attention: the
    recomputation records it for autograd, with what it saves, but does not repeat its arithmetic."""
    current = None if torch.compiler.is_compiling() else _local.current
    if current is None or not current.keeps:
        return function(*inputs)
    with Intercept(current.result):
        return function(*inputs)


def unread(result: Tensor) -> Tensor:
    """`result`, whose values the backward pass does not read: if it is the last one kept, it is let go, and the
    recomputation has NaN in its stead."""
    current = None if torch.compiler.is_compiling() else _local.current
    if current is not None and current.is_first and current.results:
        current.results[-1].forget(result)
    return result


def is_recomputed() -> bool:
    """Whether a pass runs of which autograd saves nothing, since the backward pass computes it again."""
    return not torch.compiler.is_compiling() and _local.current is not None


def is_computed_again(*, keeps: bool = False) -> bool:
    """Whether a recomputation runs; with `keeps`, one that takes results that were kept."""
    current = _local.current
    return current is not None and not current.is_first and (current.keeps or not keeps)


def passes(*, keeps: bool) -> tuple[_Pass, _Pass]:
    """The context of a block's forward pass and that of its recomputations, which may be several. With `keeps` False
    no result is kept. Is the `context_fn` of `torch.utils.checkpoint.checkpoint`."""
    results: list[_Result] = []
    forward = _Pass(results, keeps=keeps, is_first=True)
    recomputation = _Pass(results, keeps=keeps, is_first=False)
    return forward, recomputation


class _Pass:
    """A forward pass of a block, which keeps results, or a recomputation, which takes them in the same order."""

    def __init__(self, results: list[_Result], *, keeps: bool, is_first: bool) -> None:
        self.keeps = keeps
        self.results = results
        self.is_first = is_first
        self._position = 0  # of the next result to take
        self._outer: _Pass | None = None

    def __enter__(self) -> None:
        self._position = 0
        self._outer, _local.current = _local.current, self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _local.current, self._outer = self._outer, None

    def result(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returns: a tensor, or a tuple with tensors. Raises ModelError where the recomputation asks
        for another result than the forward pass kept, or where one was written to."""
        if name.partition("::")[1] and name not in KEPT_OPERATIONS:
            return compute()
        if self.is_first:
            value = compute()
            self.results.append(_Result(name, value))
            return value
        if self._position == len(self.results):
            raise ModelError(_ANOTHER_PATH, got=name, expected="no further result", fix=_FIX)
        found = self.results[self._position]
        if found.name != name:
            raise ModelError(_ANOTHER_PATH, got=name, expected=found.name, fix=_FIX)
        self._position += 1
        return found.taken()


_ANOTHER_PATH = "the recomputation of a block computes something else than its forward pass"
_FIX = "let the block depend on its inputs alone, or train with trainer.activation_checkpointing=none"


class _Result:
    """A tensor or a tuple with tensors; of a forgotten tensor only the shape."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._is_tuple = isinstance(value, tuple)
        # Without its autograd graph, which would keep everything that the result was computed from.
        self._parts = [_alias(each) for each in (value if self._is_tuple else (value,))]
        self._versions = [each._version for each in self._parts if isinstance(each, Tensor)]
        self._is_forgotten = False

    def taken(self) -> Any:
        """The value, sharing the memory of the first one."""
        if self._is_forgotten:
            shape, dtype, device = self._parts
            return torch.full(shape, torch.nan, dtype=dtype, device=device)
        if self._versions != [each._version for each in self._parts if isinstance(each, Tensor)]:
            fix = "compute in place nowhere in a block, or train with trainer.activation_checkpointing=none"
            raise ModelError("a result kept for the backward pass was written to", got=self.name, fix=fix)
        values = [_alias(each) for each in self._parts]
        return tuple(values) if self._is_tuple else values[0]

    def forget(self, result: Tensor) -> None:
        """Let go of the memory if `result` is this one, perhaps under another shape."""
        own = self._parts[0]
        if self._is_forgotten or self._is_tuple:
            return
        # By storage, which a fake tensor has too, where it has no address.
        storages = [(each.untyped_storage()._cdata, each.storage_offset(), each.numel()) for each in (own, result)]
        if storages[0] == storages[1]:
            self._parts, self._is_forgotten = [own.shape, own.dtype, own.device], True


def _alias(value: Any) -> Any:
    """A tensor over the same memory that counts the same writes; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    # Below a dispatch mode a plain `detach` would count its own writes, so that those to the result went unnoticed.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


class Intercept(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each operation of torch that runs to a function, as a name and what computes it."""

    def __init__(self, function: Callable[[str, Callable[[], Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._function = function

    def __torch_dispatch__(self, operation: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
        return self._function(operation.name(), partial(operation, *inputs, **(options or {})))
