"""Async rewards and environments share one event loop for as long as a run lasts."""

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.roles.rewards import scorer_of
from tests.kits.rlhf import runs
from tests.kits.rlhf.roles.test_rewards import ANSWERS, TOKENIZER


class Client:
    """A judge whose requests are answered by a task of its own, as those of connection pools are."""

    def __init__(self) -> None:
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.limit = asyncio.Semaphore(1)
        self.requests: asyncio.Queue[tuple[str, asyncio.Future[float]]] | None = None
        self.worker: asyncio.Task[None] | None = None

    async def _answer(self, requests: Any) -> None:
        while True:
            text, reply = await requests.get()
            await asyncio.sleep(0.001)
            reply.set_result(len(text) % 3)

    async def ask(self, text: str) -> float:
        self.loops.append(asyncio.get_running_loop())
        if self.requests is None:
            self.requests = asyncio.Queue()
            self.worker = asyncio.create_task(self._answer(self.requests))
        async with self.limit:
            reply: asyncio.Future[float] = asyncio.get_running_loop().create_future()
            await self.requests.put((text, reply))
            return await asyncio.wait_for(reply, 2.0)

    async def __call__(self, *, completions: list[str]) -> list[float]:
        return list(await asyncio.gather(*(self.ask(text) for text in completions)))


def test_a_client_serves_every_call_of_a_reward() -> None:
    client = Client()
    scorer = scorer_of([client, "exact"], TOKENIZER)
    for _ in range(3):
        assert [each.score for each in scorer.checked_rewards(ANSWERS)] == [1.0, 1.0]
    assert len(set(client.loops)) == 1


def test_a_client_serves_calls_from_several_threads() -> None:
    client, found = Client(), []
    scorer = scorer_of(client, TOKENIZER)
    threads = [threading.Thread(target=lambda: found.append(scorer.checked_rewards(ANSWERS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[each.score for each in scores] for scores in found] == [[0.0, 1.0]] * 4


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_client_serves_all_rollout_batches_of_a_run_and_its_evaluations(staleness: int, tmp_path: Path) -> None:
    client = Client()
    choices: dict[str, Any] = {"trainer.max_steps": 3, "trainer.eval_every": 1, "rollout.max_staleness": staleness}
    choices |= {"importance_sampling.mode": "truncate", "rl.old_logprobs": "recompute"}
    assembly = runs.begin("grpo", tmp_path, choices, roles={"reward": client})
    runs.finish(assembly)
    assert len(set(client.loops)) == 1 and len(client.loops) > 3 * 16
    assert client.loops[0].is_closed()
    assert client.worker is not None and client.worker.cancelled()


def test_a_reward_and_an_environment_may_share_a_client(tmp_path: Path) -> None:
    client = Client()

    class Asking:
        def reset(self, row: Any) -> str:
            return ""

        async def step(self, response: str) -> tuple[str, float, bool]:
            return "", await client.ask(response), True

    runs.finish(runs.begin("grpo", tmp_path, {"trainer.max_steps": 2}, roles={"environment": Asking}))
    assert len(set(client.loops)) == 1 and client.loops[0].is_closed()


def test_a_loop_that_is_closed_or_dropped_ends_its_thread() -> None:
    before = threading.active_count()
    loops = [EventLoop(), EventLoop()]
    assert [each.run(asyncio.sleep(0, "done")) for each in loops] == ["done", "done"]
    assert threading.active_count() == before + 2
    loops.pop().close()
    loops.clear()
    assert threading.active_count() == before


def test_an_awaitable_of_any_kind_is_awaited() -> None:
    class Later:
        def __await__(self) -> Any:
            yield from asyncio.sleep(0).__await__()
            return 3

    later: Awaitable[int] = Later()
    loop = EventLoop()
    assert loop.run(later) == 3
    loop.close()
