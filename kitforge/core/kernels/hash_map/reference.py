"""The definition of `hash_map`: a dict."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.unique.reference import unique


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundIds:
    """Ids [N] of a lookup, with the slots that a map has for them."""

    keys: Tensor  # [u] the distinct ids in order of first occurrence
    inverse: Tensor  # [N] the index of each id among them
    slots: Tensor  # [u], -1 for a key that is not in the map
    num_missing: int
    num_outside: int  # ids that are negative or not below the bound


class HashMapKernel(Protocol):
    """A map from keys, any int64, to slots, int64 other than -1. Keys of one call are distinct. Not thread-safe."""

    def __len__(self) -> int:
        """The number of keys."""

    def lookup(self, keys: Tensor, marks: Tensor | None = None, mark: int = 0) -> Tensor:
        """The slots [n] of keys [n], -1 for a missing key; without `marks`, keys may repeat.

        With `marks` int64 [slots], sets `marks[slot] = mark` for each slot from 0 on.
        """

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        """Map keys [n] to slots [n]. Returns their slots [n] before, -1 for a new key."""

    def replace(self, keys: Tensor, slots: Tensor) -> None:
        """Map keys [n], all of which are in the map, to other slots [n]."""

    def remove(self, keys: Tensor) -> Tensor:
        """Remove keys [n]. Returns the slots [n] they had, -1 for a missing key."""

    def items(self) -> tuple[Tensor, Tensor]:
        """All keys [n] in ascending order and their slots [n]."""

    def find_distinct(self, ids: Tensor, bound: int | None = None) -> FoundIds:
        """The distinct ones of ids [N] and their slots. On a device, the host waits for it once."""


class HashMapFactory(Protocol):
    """Makes an empty map with room for that many keys before it grows."""

    def __call__(self, room: int = 0) -> HashMapKernel: ...


class DictHashMap:
    """See `HashMapKernel`."""

    def __init__(self, room: int = 0) -> None:
        self._slots: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def lookup(self, keys: Tensor, marks: Tensor | None = None, mark: int = 0) -> Tensor:
        found = [self._slots.get(key, -1) for key in keys.tolist()]
        slots = torch.tensor(found, dtype=torch.int64, device=keys.device)
        if marks is not None:
            marks[slots[slots >= 0]] = mark
        return slots

    def insert(self, keys: Tensor, slots: Tensor) -> Tensor:
        before = self.lookup(keys)
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        return before

    def replace(self, keys: Tensor, slots: Tensor) -> None:
        self.insert(keys, slots)

    def remove(self, keys: Tensor) -> Tensor:
        before = [self._slots.pop(key, -1) for key in keys.tolist()]
        return torch.tensor(before, dtype=torch.int64, device=keys.device)

    def items(self) -> tuple[Tensor, Tensor]:
        keys = sorted(self._slots)
        slots = [self._slots[key] for key in keys]
        return torch.tensor(keys, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)

    def find_distinct(self, ids: Tensor, bound: int | None = None) -> FoundIds:
        return found_among(self, *unique(ids), bound)


def found_among(slots_by_key: HashMapKernel, keys: Tensor, inverse: Tensor, bound: int | None) -> FoundIds:
    """The slots of distinct `keys` [u], for a map whose lookups do not wait for a device."""
    slots = slots_by_key.lookup(keys)
    num_outside = 0 if bound is None else int(((keys < 0) | (keys >= bound))[inverse].sum())
    return FoundIds(
        keys=keys, inverse=inverse, slots=slots, num_missing=int((slots < 0).sum()), num_outside=num_outside
    )
