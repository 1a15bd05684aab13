"""A priority queue of slots by lowest score that does not sort all slots for every pick."""

from collections.abc import Callable

import torch
from torch import Tensor

# A search sorts at least this share of all slots, so that searches are rare.
SEARCH_DIVISOR = 16
# The mask [n] of those of these slots [n] that may be picked.
EvictableMask = Callable[[Tensor], Tensor]


class LowestScoreQueue:
    """Picks slots in use by ascending score, and by slot where scores are equal.

    A search sorts the slots of lowest score up to a bound. Any slot at or below the bound later was either found by
    that search or is among `reset_slots`, since other scores only rise; so the queue is complete until it is empty.
    """

    def __init__(self) -> None:
        self._queue = torch.empty(0, dtype=torch.int64)
        self._scores = torch.empty(0)  # of the queue, when it was made
        self._is_searched = False
        self._bound = 0.0
        # Slots with new scores since the search, which may be lower than before.
        self.reset_slots: list[Tensor] = []

    def pick(self, scores: Tensor, used: Callable[[], Tensor], num: int, is_evictable: EvictableMask) -> Tensor:
        """The `num` evictable slots of lowest score, or all evictable ones where there are fewer.

        `used` gives all slots in use. A slot no longer in use is not evictable.
        """
        if self._is_searched:
            # The slots up to the bound, lowest score first.
            fresh = torch.cat([*self.reset_slots, self._queue[:0]])
            fresh = fresh[scores[fresh] <= self._bound]
            now = scores[self._queue]
            is_low = now <= self._bound
            # Scores that have risen are mostly above the bound, and the order of the others stands.
            is_sorted = not len(fresh) and torch.equal(now[is_low], self._scores[is_low])
            self.reset_slots, self._queue = [], self._queue[is_low]
            if not is_sorted:
                self._queue = _by_score(scores, torch.unique(torch.cat([self._queue, fresh])))
            self._scores = scores[self._queue]
            picked = self._queue[is_evictable(self._queue)][:num]
            if len(picked) == num:
                return picked
        size = max(2 * num, len(scores) // SEARCH_DIVISOR)
        while True:
            is_complete = self._search(scores, used(), size)
            picked = self._queue[is_evictable(self._queue)][:num]
            if is_complete or len(picked) == num:
                return picked
            size *= 4

    def _search(self, scores: Tensor, used: Tensor, size: int) -> bool:
        """Sort the `size` slots of lowest score and those equal to the last of them; True if these are all."""
        is_complete = size >= len(used)
        if not is_complete:
            bound = scores[used].kthvalue(size).values
            used = used[scores[used] <= bound]
        self._queue = _by_score(scores, used)
        self._scores = scores[self._queue]
        self._bound = float(self._scores[-1]) if len(used) else -float("inf")
        self.reset_slots, self._is_searched = [], True
        return is_complete


def _by_score(scores: Tensor, slots: Tensor) -> Tensor:
    return slots[scores[slots].argsort(stable=True)]
