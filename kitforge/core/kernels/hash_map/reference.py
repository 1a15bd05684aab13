"""The definition of `hash_map`: a dict."""

from __future__ import annotations

from typing import Protocol, final

import torch
from torch import Tensor


class HashMapKernel(Protocol):
    """A map from keys, any int64, to slots, int64 from 0. Keys of one call are distinct. Not thread-safe."""

    def __len__(self) -> int:
        """The number of keys."""
        ...

    def lookup(self, keys: Tensor, out: Tensor | None = None, through: Tensor | None = None) -> Tensor:
        """The slots [n] of keys [n], -1 for a missing key; here keys may repeat. `out` int64 [n] is reused.

        With `through` int64 [slots], returns `through[slot]` instead of each slot.
        """
        ...

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Map keys [n] to slots [n]. Returns their slots [n] before, -1 for a new key."""
        ...

    def remove(self, keys: Tensor) -> Tensor:
        """Remove keys [n]. Returns the slots [n] they had, -1 for a missing key."""
        ...

    def items(self) -> tuple[Tensor, Tensor]:
        """All keys [n] in ascending order and their slots [n]."""
        ...


class HashMapFactory(Protocol):
    """Makes an empty map with room for that many keys before it grows."""

    def __call__(self, room: int = 0) -> HashMapKernel: ...


@final
class DictHashMap:
    """See `HashMapKernel`."""

    def __init__(self, room: int = 0) -> None:
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, keys: Tensor, out: Tensor | None = None, through: Tensor | None = None) -> Tensor:
        slots = torch.tensor([self._slots.get(key, -1) for key in keys.tolist()], dtype=torch.int64)
        if through is not None:
            slots[slots >= 0] = through[slots[slots >= 0]]
        return slots if out is None else out.copy_(slots)

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        before = self.lookup(keys)
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        return before

    def remove(self, keys: Tensor) -> Tensor:
        return torch.tensor([self._slots.pop(key, -1) for key in keys.tolist()], dtype=torch.int64)

    def items(self) -> tuple[Tensor, Tensor]:
        keys = sorted(self._slots)
        slots = [self._slots[key] for key in keys]
        return torch.tensor(keys, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
