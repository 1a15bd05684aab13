"""Answers that are drawn ahead of their round, beside the training on earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import final

import torch
from torch import nn

from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout


@final
class AsyncRollouts:
    """Draws by a policy as it was `staleness` rounds ago.

    The rule: the answers of round n are those of the policy at the beginning of round max(0, n - staleness), whatever
    takes how long; so a run with a staleness is as repeatable as one without. A thread draws them, from a copy of the
    weights; a round that is needed before it is ready is waited for.
    """

    def __init__(
        self,
        staleness: int,
        generate: Callable[[nn.Module, int], list[Rollout]],
        copy: Callable[[nn.Module], nn.Module],
    ) -> None:
        self._staleness = staleness
        self._generate = generate
        self._copy = copy
        self._futures: dict[int, Future[list[Rollout]]] = {}
        # Sums are added up by as many threads as on the way without a staleness.
        threads = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "rollouts", initializer=torch.set_num_threads, initargs=(threads,))

    def collect(self, policy: nn.Module, number: int) -> list[Rollout]:
        """The answers of a round; those of a later one are begun with the policy as it is now."""
        wanted = [each for each in range(number, number + self._staleness + 1) if each not in self._futures]
        if wanted:
            snapshot = self._copy(policy)
            self._futures |= {each: self._worker.submit(self._generate, snapshot, each) for each in wanted}
        return self._futures.pop(number).result()

    def close(self) -> None:
        """Begin no further round."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def pending(self) -> dict[int, list[Rollout]]:
        """The answers of the rounds to come, once they are there."""
        return {number: found.result() for number, found in self._futures.items()}

    def restore(self, rounds: Mapping[int, Sequence[Rollout]]) -> None:
        """Take back what `drawn` gave."""
        self._futures = {}
        for number, answers in rounds.items():
            self._futures[number] = Future()
            self._futures[number].set_result(list(answers))
