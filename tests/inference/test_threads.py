"""One pipeline or engine in many threads: every text is the one it is alone, and nobody waits for ever."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.inference.engine import Engine
from kitforge.inference.fair_lock import FairLock
from kitforge.inference.model_runner import ModelRunner
from kitforge.inference.options import EngineOptions
from kitforge.inference.pipeline import TextGenerationPipeline
from kitforge.inference.sampling import SamplingOptions
from kitforge.inference.text_engine import Detokenizer, InferenceOptions
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from tests.inference.recomputation import network, recomputed
from tests.patience import PATIENCE
from tests.trainer import tiny

CHAT = [{"role": "user", "content": "the sun?"}]


@pytest.fixture
def pipeline() -> TextGenerationPipeline:
    return new_pipeline()


def new_pipeline(level: CompileLevel = "O1") -> TextGenerationPipeline:
    model = build(config_of(tiny.LLAMA | {"vocab_size": 259}), device=torch.device("cpu"), seed=3, level=level)
    options = InferenceOptions(
        max_new_tokens=8, temperature=1.0, engine=EngineOptions(max_num_seqs=3, max_num_batched_tokens=16)
    )
    return TextGenerationPipeline(model, ByteTokenizer(), options)


@pytest.fixture
def interleaved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads change places after every instruction that lets them, and in the middle of every step."""
    run = ModelRunner.run

    def slow(runner: ModelRunner, works: list[Any]) -> Any:
        time.sleep(0.0005)
        found = run(runner, works)
        time.sleep(0.0005)
        return found

    monkeypatch.setattr(ModelRunner, "run", slow)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """What each of the jobs gives or raises when all begin at once."""
    found: list[Any] = [None] * len(jobs)
    begin = threading.Barrier(len(jobs))

    def do(place: int) -> None:
        begin.wait(PATIENCE)
        try:
            found[place] = jobs[place]()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            found[place] = error

    threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    return found


def is_idle(engine: Engine) -> bool:
    engine.step()  # tells of what was cancelled, and has nothing else to do
    stats = engine.stats()
    return not engine.has_work and stats["blocks_used"] == stats["running"] == stats["waiting"] == 0


def calls(pipeline: TextGenerationPipeline, thread: int) -> list[Callable[[], Any]]:
    """Texts, lists of them, samples, chats, stop strings and streams."""

    def left() -> str:
        stream = pipeline.stream(f"{thread} left", max_new_tokens=30, seed=thread)
        return next(stream)

    return [
        lambda: pipeline(f"{thread} ROMEO", seed=thread),
        lambda: pipeline([f"{thread} a", f"{thread} b", "c"], num_samples=2, seed=thread),
        left,
        lambda: pipeline([*CHAT, {"role": "user", "content": str(thread)}], seed=thread),
        lambda: "".join(pipeline.stream(f"{thread} JULIET", max_new_tokens=12, seed=thread)),
        lambda: pipeline(f"{thread} stop", stop=["e", "a", "t"], max_new_tokens=20, seed=thread),
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("interleaved")
def test_every_thread_gets_the_texts_that_it_gets_alone(pipeline: TextGenerationPipeline) -> None:
    alone = [[call() for call in calls(pipeline, thread)] for thread in range(4)]

    def work(thread: int) -> list[Any]:
        mine = calls(pipeline, thread)
        # Each begins elsewhere, so that different kinds of calls meet.
        order = [(place + thread) % len(mine) for place in range(len(mine))]
        return [found for _, found in sorted((place, mine[place]()) for place in order)]

    assert in_threads(*(lambda thread=thread: work(thread) for thread in range(4))) == alone
    pipeline("the last one lets go of streams that were left")
    assert is_idle(pipeline._text_engine.engine) and not pipeline._deltas


@pytest.mark.usefixtures("interleaved")
def test_an_error_in_a_step_reaches_the_thread_that_made_it(
    pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [pipeline(f"{thread} ROMEO", max_new_tokens=20, seed=thread) for thread in range(3)]
    run, doomed = ModelRunner.run, threading.local()

    def failing(runner: ModelRunner, works: list[Any]) -> Any:
        if getattr(doomed, "is_doomed", False):
            raise RuntimeError("out of memory")
        return run(runner, works)

    def fail() -> Any:
        doomed.is_doomed = True
        # Longer than the others, which may otherwise make all steps for it.
        return pipeline("doomed", max_new_tokens=50)

    monkeypatch.setattr(ModelRunner, "run", failing)
    jobs = [lambda thread=thread: pipeline(f"{thread} ROMEO", max_new_tokens=20, seed=thread) for thread in range(3)]
    *texts, error = in_threads(*jobs, fail)
    assert texts == alone
    assert isinstance(error, RuntimeError)
    assert is_idle(pipeline._text_engine.engine)


@pytest.mark.usefixtures("interleaved")
def test_tokens_without_words_concern_their_own_text_whoever_makes_the_step(
    pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [pipeline(f"{thread} ROMEO", max_new_tokens=20, seed=thread) for thread in range(3)]
    push = Detokenizer.push

    def picky(text: Detokenizer, tokens: list[int], *, is_last: bool = False) -> str:
        if text._stop == ("doomed",) and len(text._tokens) > 3:
            raise IndexError("piece id is out of range")
        return push(text, tokens, is_last=is_last)

    monkeypatch.setattr(Detokenizer, "push", picky)
    jobs = [lambda thread=thread: pipeline(f"{thread} ROMEO", max_new_tokens=20, seed=thread) for thread in range(3)]
    *texts, error = in_threads(*jobs, lambda: pipeline("doomed", max_new_tokens=20, stop=["doomed"]))
    assert texts == alone
    assert isinstance(error, IndexError)
    assert is_idle(pipeline._text_engine.engine)


@pytest.mark.slow
def test_a_stream_that_is_collected_in_the_middle_of_a_step_harms_nobody(
    pipeline: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = pipeline("the sun", max_new_tokens=12)
    held = pipeline.stream("left", max_new_tokens=20)
    next(held)
    streams = [held]
    del held
    choose = Engine._sample

    def collecting(engine: Engine, *given: Any) -> None:
        if streams:
            streams.clear()
            gc.collect()
        choose(engine, *given)

    monkeypatch.setattr(Engine, "_sample", collecting)
    assert pipeline("the sun", max_new_tokens=12) == alone
    assert pipeline("the sun", max_new_tokens=12) == alone
    assert is_idle(pipeline._text_engine.engine) and not pipeline._deltas


@pytest.mark.usefixtures("interleaved")
def test_an_engine_generates_in_several_threads_beside_one_that_steps() -> None:
    model, options = network("llama"), SamplingOptions(max_new_tokens=12, temperature=1.0)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    engine = Engine(model, EngineOptions(max_num_seqs=2, block_size=4))
    wanted = [recomputed(model, prompt, options, key).tokens for key, prompt in enumerate(prompts)]

    def generate() -> list[list[int]]:
        return [samples[0].tokens for samples in engine.generate(prompts, options)]

    def step() -> list[list[int]]:
        requests = [engine.submit(prompt, options, key=key) for key, prompt in enumerate(prompts)]
        tokens: dict[int, list[int]] = {request: [] for request in requests}
        while any(len(each) < 12 for each in tokens.values()):
            for output in engine.step():
                tokens[output.request] += output.tokens
        return list(tokens.values())

    assert in_threads(generate, generate, step) == [wanted] * 3
    assert is_idle(engine)


def until(holds: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_the_lock_goes_to_whoever_asked_first_and_not_back_to_the_one_that_had_it() -> None:
    lock, order = FairLock(), []

    def take(name: str) -> None:
        with lock, lock:
            order.append(name)

    threads = [threading.Thread(target=take, args=(name,), daemon=True) for name in "abc"]
    with lock:
        for place, thread in enumerate(threads):
            thread.start()
            until(lambda place=place: len(lock._turns) == place + 1)
    take("main")
    for thread in threads:
        thread.join(PATIENCE)
    assert order == ["a", "b", "c", "main"]


def test_one_that_is_interrupted_while_it_waits_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, order = FairLock(), []

    class Interrupted:
        """A turn whose owner is interrupted before it comes, or just after it has come."""

        def __init__(self, comes_first: bool) -> None:
            self._turn, self._comes_first, self._count = real(), comes_first, 0

        def acquire(self) -> None:
            self._count += 1
            if self._count == 1:
                self._turn.acquire()
                return
            if self._comes_first:
                self._turn.acquire()
            raise KeyboardInterrupt

        def release(self) -> None:
            self._turn.release()

    def interrupted() -> None:
        try:
            lock.__enter__()
        except KeyboardInterrupt:
            order.append("interrupted")

    real = threading.Lock
    for comes_first in (False, True):
        with lock:
            made = SimpleNamespace(
                Lock=lambda comes_first=comes_first: Interrupted(comes_first), get_ident=threading.get_ident
            )
            monkeypatch.setattr("kitforge.inference.fair_lock.threading", made)
            thread = threading.Thread(target=interrupted, daemon=True)
            thread.start()
            until((lambda: lock._turns) if comes_first else (lambda: order))
        thread.join(PATIENCE)
        with lock:
            pass
    assert order == ["interrupted"] * 2


@pytest.mark.usefixtures("interleaved")
def test_a_long_stream_lets_others_in(pipeline: TextGenerationPipeline) -> None:
    long = pipeline.stream("long", max_new_tokens=50)
    next(long)
    ends: list[int] = []
    seen = 1
    is_begun = threading.Event()

    def short() -> None:
        is_begun.set()
        pipeline("short", max_new_tokens=5)
        ends.append(seen)

    thread = threading.Thread(target=short, daemon=True)
    thread.start()
    assert is_begun.wait(PATIENCE)
    for _ in long:
        seen += 1
    thread.join(PATIENCE)
    assert ends and ends[0] < seen
