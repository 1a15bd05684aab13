"""Jobs of concurrent requests in batches: bounded, each answered once, and failing alone."""

import asyncio
from collections.abc import Sequence

import pytest

from kitforge.inference.server.batcher import DynamicBatcher
from kitforge.inference.server.metrics import BatchMetrics


def answered(
    inputs: Sequence[int], sizes: Sequence[int], max_rows: int
) -> tuple[list[int | BaseException], list[list[int]]]:
    """What comes of inputs that are submitted together, and the batches that they were answered in. -1 fails."""
    batches: list[list[int]] = []

    def answer(batch: Sequence[int]) -> list[int]:
        batches.append(list(batch))
        if -1 in batch:
            raise ValueError("minus one")
        return [each * 10 for each in batch]

    async def ask() -> list[int | BaseException]:
        batcher = DynamicBatcher(answer, BatchMetrics(), max_rows=max_rows, max_wait_ms=50)
        waiting = [asyncio.ensure_future(batcher.submit(*job)) for job in zip(inputs, sizes, strict=True)]
        await asyncio.sleep(0)
        batcher.start()
        # What was submitted is answered before the end.
        await asyncio.to_thread(batcher.stop)
        return await asyncio.gather(*waiting, return_exceptions=True)

    return asyncio.run(ask()), batches


def test_a_batch_has_at_most_so_many_rows_and_a_larger_job_is_one_of_its_own() -> None:
    found, batches = answered([1, 2, 3, 4, 5], [2, 2, 1, 9, 1], max_rows=4)
    assert found == [10, 20, 30, 40, 50]
    assert batches == [[1, 2], [3], [4], [5]]


def test_a_job_that_fails_fails_alone() -> None:
    found, batches = answered([1, -1, 3], [1, 1, 1], max_rows=8)
    assert (found[0], found[2]) == (10, 30)
    assert isinstance(found[1], ValueError)
    assert batches == [[1, -1, 3], [1], [-1], [3]]


def test_a_job_that_nobody_waits_for_is_not_answered() -> None:
    async def ask() -> list[int]:
        seen: list[int] = []

        def answer(batch: Sequence[int]) -> list[int]:
            seen.extend(batch)
            return list(batch)

        batcher = DynamicBatcher(answer, BatchMetrics(), max_rows=8, max_wait_ms=0)
        gone, other = (asyncio.ensure_future(batcher.submit(number, 1)) for number in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        batcher.start()
        assert await other == 2
        with pytest.raises(asyncio.CancelledError):
            await gone
        await asyncio.to_thread(batcher.stop)
        return seen

    assert asyncio.run(ask()) == [2]
