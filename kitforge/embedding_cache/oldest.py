"""The slots that have not been used for longest, at a cost of the slots used, not of all there are."""

from __future__ import annotations

from collections import deque
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.places import at, where
from kitforge.embedding_cache.coldest import MayGo
from kitforge.embedding_cache.index import SlotIndex

# The queue is cleared of slots that were used again when it is this many times as long as all slots are.
LARGEST_SHARE = 2


@final
class Oldest:
    """Slots in the order of their last use, as `SlotIndex.touch` has it, whose numbers never fall.

    A queue of all uses. One that was followed by another use of its slot, or after which its slot was freed, counts for
    nothing, and is dropped when the queue is looked at.
    """

    def __init__(self, index: SlotIndex) -> None:
        self._index = index
        self._uses: deque[tuple[int, Tensor]] = deque()
        self._length = 0

    def used(self, slots: Tensor, number: int) -> None:
        """Distinct slots that were touched with that number."""
        self._uses.append((number, slots))
        self._length += len(slots)
        if self._length > LARGEST_SHARE * self._index.room:
            self._uses = deque(map(self._last, self._uses))
            self._length = sum(len(slots) for _, slots in self._uses)

    def pick(self, num: int, may_go: MayGo) -> Tensor:
        """The `num` slots used longest ago that may go, or all that may go where there are fewer."""
        picked, looked_at = [], []
        while num > 0 and self._uses:
            use = self._uses.popleft()
            number, slots = self._last(use)
            self._length -= len(use[1]) - len(slots)
            going = at(slots, where(may_go(slots))[:num])
            picked.append(going)
            num -= len(going)
            if len(slots):
                looked_at.append((number, slots))
        self._uses.extendleft(reversed(looked_at))
        return torch.cat([*picked, torch.empty(0, dtype=torch.int64)])

    def _last(self, use: tuple[int, Tensor]) -> tuple[int, Tensor]:
        """A use without the slots of which it was not the last."""
        number, slots = use
        return number, at(slots, where(at(self._index.last_use, slots) == number))
