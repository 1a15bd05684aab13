"""Counts the reads for which the host would wait for a device, with CPU tensors that stand in for those on a device.

Tensors that are marked, and whatever is computed from them, count as on the device.
"""

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
# Their result, or the size of it, must be known to the host.
_READS = {_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.equal.default, _aten.masked_select.default}
_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.cpu}


class DeviceReads(TorchDispatchMode):
    """`found` names each read and where it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        # By address of the storage, which is kept so that no other gets its address.
        self._on_device: dict[int, torch.UntypedStorage] = {}

    def mark(self, tensor: Tensor) -> None:
        """This tensor is on the device."""
        storage = tensor.untyped_storage()
        self._on_device[storage._cdata] = storage

    def is_on_device(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._on_device

    def note(self, name: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/kitforge/" in frame.filename]
        self.found.append(f"{name} in {', '.join(frame.name for frame in frames[-3:])}")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_hot = any(map(self.is_on_device, tree_leaves((args, kwargs or {}))))
        by_mask = func is _aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1])
        if is_hot and (func in _READS or by_mask):
            self.note(str(func))
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output) if is_hot else ():
            if isinstance(each, Tensor):
                self.mark(each)
        return output


class _Methods(TorchFunctionMode):
    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _METHODS and self._reads.is_on_device(args[0]):
            self._reads.note(func.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[DeviceReads]:
    """Count within."""
    reads = DeviceReads()
    with _Methods(reads), reads:
        yield reads
