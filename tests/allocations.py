"""What torch holds in memory while something is done. Files that are mapped take none."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Bytes. What is smaller than this is not looked up among the files.
COUNTED = 2**16


class Allocations(TorchDispatchMode):
    """Bytes of the largest storage that torch makes on the CPU, and the most that large ones have at once."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.most = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {each.untyped_storage()._cdata for each in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        self._live = {key: (each, size) for key, (each, size) in self._live.items() if not each.expired()}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key in given or key in self._live or is_mapped(storage):
                continue
            self.largest = max(self.largest, size)
            if size >= COUNTED:
                self._live[key] = (StorageWeakRef(storage), size)
        self.most = max(self.most, sum(size for _, size in self._live.values()))
        return result


def tensors_in(value: Any) -> Iterator[Tensor]:
    found = torch.utils._pytree.tree_leaves(value)
    return (each for each in found if type(each) is Tensor or type(each) is nn.Parameter if each.device.type == "cpu")


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether its bytes are those of a file of weights, which take no memory."""
    address = storage.data_ptr()
    if storage.nbytes() < COUNTED or address == 0:
        return False
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(each, 16) for each in line.split()[0].split("-"))
        if first <= address < last:
            return line.endswith(".safetensors")
    return False
