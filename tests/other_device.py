"""A device that is not the CPU, for tests on machines without one: its tensors lie in main memory, but do not mix.

Within `other_device` the device "meta" computes as the CPU does. Tensors of two devices in one operation raise, and so
does `numpy` of one that is not on the CPU, as on a GPU. Triton kernels, streams and page-locked memory are not tried.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kitforge.foundation import device as devices

DEVICE = torch.device("meta")
_aten = torch.ops.aten
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
# Indices on the CPU are allowed there.
_BY_INDEX = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}


class OnDevice(Tensor):
    """A tensor on the device; `held` is its value."""

    held: Tensor
    is_meta = False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> OnDevice:
        sizes = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, **sizes, dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r})"

    def __getitem__(self, index: Any) -> Any:
        # Values of a list never reach a tensor on "meta".
        return super().__getitem__(_without_lists(index))  # type: ignore[no-untyped-call]

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


class _Factories(TorchDispatchMode):
    """Makes tensors on the device where they are asked for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _run(func, args, dict(kwargs or {}))


def _without_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index, dtype=None if index else torch.int64) if isinstance(index, list) else index


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    there = [each for each in given if isinstance(each, OnDevice)]
    strangers = [each for each in given if not isinstance(each, OnDevice) and each.dim() > 0]
    if func in _BY_INDEX:
        # The value that is written lies where it is written to.
        strangers = [each for each in strangers if each is args[0] or any(each is value for value in args[2:3])]
        there = [each for each in there if each is args[0]] or (there if strangers else there)
    if there and strangers and func not in _COPIES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {DEVICE} and cpu")
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked) == DEVICE:
        kwargs["device"] = torch.device("cpu")
    unwrapped = tree_map_only(OnDevice, lambda each: each.held, (args, kwargs))
    output = func(*unwrapped[0], **unwrapped[1])
    if func._schema.is_mutable and func is not _aten._to_copy.default:
        return _same(func, args, kwargs, output)
    is_here = torch.device(asked) != DEVICE if asked is not None else not there
    if is_here:
        return output
    return tree_map_only(Tensor, OnDevice, output)


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """What an operation in place returns: the tensors that it was given."""
    written = [
        kwargs[each.name] if each.name in kwargs else args[place]
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write and (each.name in kwargs or place < len(args))
    ]
    count = len(func._schema.returns)
    return output if count == 0 else written[0] if count == 1 else tuple(written[:count])


@contextmanager
def other_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Within, the device is there; threads that begin within see it as well."""
    run = threading.Thread.run

    def run_within(thread: threading.Thread) -> None:
        with _Factories():
            run(thread)

    with monkeypatch.context() as patch, _Factories():
        patch.setattr(threading.Thread, "run", run_within)
        patch.setattr(devices, "available", lambda: ["cpu", DEVICE.type])
        patch.setattr(devices, "count", lambda _kind: 1)
        for name in ("set_device_index", "synchronize"):
            patch.setattr(torch.accelerator, name, lambda _device: None)
        asks, new = torch.is_autocast_enabled, torch.tensor
        patch.setattr(torch, "tensor", lambda data, device="cpu", **options: new(data, **options).to(device))
        patch.setattr(torch, "is_autocast_enabled", lambda kind="cpu": asks("cpu" if kind == DEVICE.type else kind))
        yield DEVICE
