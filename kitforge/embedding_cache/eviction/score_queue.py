"""The slots with the lowest scores, a few at a time, without sorting all of them each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

# A search finds at least this share of all slots, so that searches are rare.
SEARCH_DIVISOR = 16
# Which of these slots [n] may be picked: a mask [n].
EvictableMask = Callable[[Tensor], Tensor]


@final
class LowestScoreQueue:
    """Picks slots in use by ascending score, and by slot where scores are equal.

    A search sorts the coldest slots up to a bound. Whatever has at most that score later is among those that the search
    found or among those `restarted`, since other scores only rise; so nothing colder is overlooked until they run out.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the last search, as when all scores have changed."""
        self._queue = torch.empty(0, dtype=torch.int64)
        self._scores = torch.empty(0)  # of the queue, when it was made
        self._is_searched = False
        self._bound = 0.0
        self._reset_slots: list[Tensor] = []

    def on_score_reset(self, slots: Tensor) -> None:
        """These slots have new scores, which may be lower than before."""
        self._reset_slots.append(slots)

    def pick(self, scores: Tensor, used: Callable[[], Tensor], num: int, is_evictable: EvictableMask) -> Tensor:
        """The `num` slots of lowest score that may go, or all that may go where there are fewer.

        `used` gives all slots in use. A slot no longer in use may not go.
        """
        if self._is_searched:
            picked = self._remaining(scores, is_evictable)[:num]
            if len(picked) == num:
                return picked
        size = max(2 * num, len(scores) // SEARCH_DIVISOR)
        while True:
            is_complete = self._search(scores, used(), size)
            picked = self._queue[is_evictable(self._queue)][:num]
            if is_complete or len(picked) == num:
                return picked
            size *= 4

    def _remaining(self, scores: Tensor, is_evictable: EvictableMask) -> Tensor:
        """What may go of all slots below the bound, the coldest first."""
        fresh = torch.cat([*self._reset_slots, self._queue[:0]])
        fresh = fresh[scores[fresh] <= self._bound]
        now = scores[self._queue]
        is_low = now <= self._bound
        # Scores that have risen are mostly above the bound, and the order of the others stands.
        is_sorted = not len(fresh) and torch.equal(now[is_low], self._scores[is_low])
        self._reset_slots, self._queue = [], self._queue[is_low]
        if not is_sorted:
            self._queue = _by_score(scores, torch.unique(torch.cat([self._queue, fresh])))
        self._scores = scores[self._queue]
        return self._queue[is_evictable(self._queue)]

    def _search(self, scores: Tensor, used: Tensor, size: int) -> bool:
        """Sort the `size` coldest slots and those equal to the last of them; whether these are all."""
        is_complete = size >= len(used)
        if not is_complete:
            bound = scores[used].kthvalue(size).values
            used = used[scores[used] <= bound]
        self._queue = _by_score(scores, used)
        self._scores = scores[self._queue]
        self._bound = float(self._scores[-1]) if len(used) else -float("inf")
        self._reset_slots, self._is_searched = [], True
        return is_complete


def _by_score(scores: Tensor, slots: Tensor) -> Tensor:
    """Ascending slots in the order of their scores."""
    return slots[scores[slots].argsort(stable=True)]
