"""Asynchronous rollouts: completions generated during training with an older policy."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout


class AsyncRollouts:
    """Generates with the policy of `staleness` rollout batches ago.

    Rollout batch n comes from the policy at the beginning of batch max(0, n - staleness), independent of timing, so
    that runs are reproducible. A thread generates with a copy of the weights; training waits for a batch that is not
    ready.
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
        # As many threads as without staleness, so that sums are reduced in the same order.
        threads = torch.get_num_threads()
        self._worker = ThreadPoolExecutor(1, "rollouts", initializer=torch.set_num_threads, initargs=(threads,))

    def collect(self, policy: nn.Module, number: int) -> list[Rollout]:
        """The completions of a rollout batch; starts a later one with the current policy."""
        wanted = [each for each in range(number, number + self._staleness + 1) if each not in self._futures]
        if wanted:
            snapshot = self._copy(policy)
            self._futures |= {each: self._worker.submit(self._generate, snapshot, each) for each in wanted}
        return self._futures.pop(number).result()

    def close(self) -> None:
        """Start no further rollout batch."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def pending(self) -> dict[int, list[Rollout]]:
        """The completions of later rollout batches, once finished."""
        return {number: found.result() for number, found in self._futures.items()}

    def restore(self, batches: Mapping[int, Sequence[Rollout]]) -> None:
        """Restore `pending`."""
        self._futures = {}
        for number, rollouts in batches.items():
            self._futures[number] = Future()
            self._futures[number].set_result(list(rollouts))
