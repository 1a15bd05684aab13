"""The definition of `hash_map`: a dict."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class DictHashMap:
    """See `core.kernels.dispatch.HashMapKernel`."""

    def __init__(self, room: int = 0) -> None:
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, keys: Tensor, out: Tensor | None = None, through: Tensor | None = None) -> Tensor:
        """See the protocol."""
        slots = torch.tensor([self._slots.get(key, -1) for key in keys.tolist()], dtype=torch.int64)
        if through is not None:
            slots[slots >= 0] = through[slots[slots >= 0]]
        return slots if out is None else out.copy_(slots)

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """See the protocol."""
        before = self.lookup(keys)
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        return before

    def remove(self, keys: Tensor) -> Tensor:
        """See the protocol."""
        return torch.tensor([self._slots.pop(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def items(self) -> tuple[Tensor, Tensor]:
        """See the protocol."""
        keys = sorted(self._slots)
        slots = [self._slots[key] for key in keys]
        return torch.tensor(keys, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
