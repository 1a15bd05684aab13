"""Two passes that take turns: who starts and awaits which message when, and what becomes of errors."""

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from kitforge.core.parallel import collectives
from kitforge.core.parallel.data import GradientBuckets
from kitforge.core.parallel.turns import Turns, communicate
from kitforge.foundation.errors import DataError
from tests.differential.drawn import drawn

CPU = torch.device("cpu")
GROUP: Any = "group"
Event = tuple[str, int, int]  # what happens, the pass and the number of its message


class Recorded:
    """Messages that note when they are started and awaited."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def send(self, number: int, message: int, size: int = 1) -> None:
        def operation(_input: Any, *, group: Any, async_op: bool = False) -> Any:
            assert group == "group"
            self.events.append(("start", number, message))
            assert async_op
            return self.Message(self.events, number, message)

        communicate(operation, torch.zeros(size), group=GROUP)

    class Message:
        def __init__(self, events: list[Event], *place: int) -> None:
            self.events, self.place = events, place

        def wait(self) -> None:
            self.events.append(("wait", *self.place))  # type: ignore[arg-type]

    def run(self, number: int, count: int, fails_at: int | None) -> int:
        for message in range(count):
            if message == fails_at:
                raise DataError(f"pass {number} has a bad row", got="it", fix="mend it")
            self.send(number, message)
        return number


def script(number: int, count: int) -> Iterator[Event | None]:
    """The events of a pass; None hands the baton over."""
    for message in range(count):
        yield "start", number, message
        yield None
        yield "wait", number, message


def in_turns(counts: tuple[int, int]) -> list[Event]:
    found, running, passes = list[Event](), 0, [script(number, count) for number, count in enumerate(counts)]
    has_ended = [False, False]
    while not all(has_ended):
        event = next(passes[running], "end")
        if event == "end":
            has_ended[running] = True
        elif event is not None:
            found.append(event)  # type: ignore[arg-type]
        if event in (None, "end") and not has_ended[1 - running]:
            running = 1 - running
    return found


@drawn(60)
@given(counts=st.tuples(st.integers(0, 6), st.integers(0, 6)))
@example(counts=(3, 3))
def test_a_message_is_awaited_by_its_pass_after_one_turn_of_the_other(counts: tuple[int, int]) -> None:
    recorded = Recorded()
    first, second = (lambda number=number: recorded.run(number, counts[number], None) for number in range(2))
    assert Turns().run((first, second), CPU) == [0, 1]
    assert recorded.events == in_turns(counts)


@drawn(60)
@given(counts=st.tuples(st.integers(1, 5), st.integers(1, 5)), data=st.data())
def test_an_error_of_one_pass_is_raised_in_its_words_and_stops_the_other(counts: tuple[int, int], data: Any) -> None:
    number, recorded, before = data.draw(st.integers(0, 1)), Recorded(), threading.active_count()
    fails_at: list[int | None] = [None, None]
    fails_at[number] = place = data.draw(st.integers(0, counts[number] - 1))
    first, second = (lambda each=each: recorded.run(each, counts[each], fails_at[each]) for each in range(2))
    with pytest.raises(DataError, match=f"pass {number} has a bad row"):
        Turns().run((first, second), CPU)
    assert threading.active_count() == before
    started = [event for event in recorded.events if event[:2] == ("start", 1 - number)]
    # The second pass has had as many turns as messages of the first, the first has had one more.
    assert len(started) == min(counts[1 - number], place + number)
    calls: list[dict[str, Any]] = []
    communicate(lambda _input, **options: calls.append(options), torch.zeros(1), group=GROUP)
    assert calls == [{"group": GROUP}]


@drawn(60)
@given(
    shared=st.integers(0, 4),
    own=st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=4, max_size=4),
    told=st.booleans(),
)
@example(shared=1, own=[[0, 2, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 0, 0, 0]], told=False)
def test_messages_between_ranks_of_other_rows_are_in_one_order(shared: int, own: list[list[int]], told: bool) -> None:
    """Of two ranks, whose passes have different numbers of messages to ranks of the same rows; if these are not in
    turn, each pass has as many turns as the other."""
    orders = list[list[Any]]()
    for rank in range(2):
        started = list[Any]()

        def send(number: int, group: Any, in_turn: bool = True, started: list[Any] = started) -> None:
            def operation(_input: Any, **_options: Any) -> Any:
                started.append((group, number))
                return Recorded.Message([], number, 0)

            communicate(operation, torch.zeros(1), group=group, in_turn=in_turn)

        def run(number: int, rank: int = rank, send: Any = send) -> None:
            for place in range(shared + 1):
                for _ in range(own[2 * rank + number][place]):
                    send(number, "rows", in_turn=not told)
                if place < shared:
                    send(number, "experts", in_turn=False)
                    send(number, "experts")

        first, second = (lambda number=number, run=run: run(number) for number in range(2))
        Turns(free=("rows",)).run((first, second), CPU)  # type: ignore[arg-type]
        orders.append([number for group, number in started if group == "experts"])
    assert orders == [[0, 0, 1, 1] * shared] * 2


def test_threads_have_what_their_caller_has() -> None:
    own, seen = contextvars.ContextVar("own", default="none"), list[tuple[Any, ...]]()
    own.set("the caller's")

    def look() -> None:
        seen.append((own.get(), torch.is_grad_enabled(), threading.current_thread()))

    with torch.no_grad():
        Turns().run((look, look), CPU)
    assert [each[:2] for each in seen] == [("the caller's", False)] * 2
    assert seen[0][2] is threading.current_thread() is not seen[1][2]


def test_the_largest_message_is_known() -> None:
    recorded, turns = Recorded(), Turns()
    turns.run((lambda: recorded.send(0, 0, size=7), lambda: recorded.send(1, 0, size=30)), CPU)
    assert turns.num_bytes == 120


def test_buckets_leave_when_both_passes_have_brought_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[Any]()

    def start(flat: Any, _group: Any) -> Any:
        sent.append(flat.clone())
        return Recorded.Message([], 0, 0)

    monkeypatch.setattr(collectives, "start_all_reduce_", start)
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    buckets = GradientBuckets(weights, group=object())  # type: ignore[arg-type]
    for is_last, num_passes in ((False, 2), (True, 2), (True, 1)):
        buckets.micro_batch(is_last, num_passes)
        for number in range(num_passes):
            assert not sent
            sum((weight * (number + 1)).sum() for weight in weights).backward()  # type: ignore[union-attr]
        # Those of both passes, and of the ones before; then the agreement on which there are.
        assert [each.tolist() for each in sent] == [[6.0] * 4] * is_last if num_passes == 2 else [[1.0] * 4]
        if is_last:
            buckets.finish()
            assert all(weight.grad is not None for weight in weights)
            for weight in weights:
                weight.grad = None
            sent.clear()
