"""Two passes as two threads that take turns, so that one computes while a message of the other is under way.

A pass starts a message, hands the baton to the other one, and waits for the message once the baton is back: in forward
passes, in backward passes and in recomputations, whose collectives are the same (dual-batch overlap, as DeepSeek-AI,
2024, "DeepSeek-V3", section 3.4, for generation). Turns are strict: whatever a message takes, passes alternate at each,
so all ranks have their collectives in one order, and every gradient is added in the order of passes one after another.
Knows no network.
"""

import contextvars
import threading
from collections.abc import Callable, Collection
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from kitforge.foundation import device as devices


class Turns:
    """The turns of two passes, and the bytes of their largest message."""

    def __init__(self, free: Collection[dist.ProcessGroup | None] = ()) -> None:
        """In `free` groups all ranks have the same passes. In others these may differ in their messages to `free`
        groups, by which one pass would overtake the other on some ranks: there the passes alternate."""
        self.num_bytes = 0
        self._free = free
        self._counts: dict[dist.ProcessGroup, list[int]] = {}  # of messages that each pass has started
        self._batons: tuple[SimpleQueue[None], SimpleQueue[None]] = (SimpleQueue(), SimpleQueue())
        self._is_alone = False  # one of the passes has ended
        self._error: BaseException | None = None

    def run(self, passes: tuple[Callable[[], Any], Callable[[], Any]], device: torch.device) -> list[Any]:
        """What two passes return, the first in this thread. What one raises is raised here, when the other one has
        stopped at its next message."""
        found: list[Any] = [None, None]
        has_gradients = torch.is_grad_enabled()

        def run(number: int) -> None:
            before, _local.own = _local.own, (self, number)
            try:
                if number == 1:
                    self._wait(number)
                # A device's thread for backward passes would be one for both, and wait for itself.
                one_thread = torch.autograd.set_multithreading_enabled(False)
                with torch.set_grad_enabled(has_gradients), devices.current(device), one_thread:
                    found[number] = passes[number]()
            except BaseException as error:  # noqa: BLE001 (raised in the thread that has called)
                self._error = error if self._error is None else self._error
            finally:
                _local.own = before
                self._is_alone = True
                self._batons[1 - number].put(None)

        second = threading.Thread(target=contextvars.copy_context().run, args=(run, 1), name="second slice")
        second.start()
        run(0)
        second.join()
        if self._error is not None:
            raise self._error
        return found

    def start(self, group: dist.ProcessGroup, number: int, in_turn: bool) -> None:
        """Wait until pass `number` may start a message to that group: the first pass starts each of them first, with
        those before it that are not in turn."""
        counts = self._counts.setdefault(group, [0, 0])
        while group not in self._free and not self._is_alone and counts[number] > counts[1 - number] - number:
            self._hand_over(number)
        counts[number] += in_turn

    def finish(self, message: dist.Work, number: int) -> None:
        """Wait for a message that pass `number` has started, after a turn of the other one."""
        if not self._is_alone:
            self._hand_over(number)
        message.wait()

    def _hand_over(self, number: int) -> None:
        self._batons[1 - number].put(None)
        self._wait(number)

    def _wait(self, number: int) -> None:
        self._batons[number].get()
        if self._error is not None:
            raise _Stopped


class _Stopped(BaseException):
    """Ends a pass whose other one has failed."""


class _Local(threading.local):
    """The turns that this thread takes, and the number of its pass."""

    own: tuple[Turns, int] | None = None


_local = _Local()


def communicate(
    operation: Callable[..., Any], *tensors: Any, group: dist.ProcessGroup, in_turn: bool = True, **options: Any
) -> None:
    """Run a collective of torch; of a pass that takes turns after one of the other pass, unless it is not `in_turn`:
    too small to be worth it, or not as often in one pass as in the other."""
    own = None if torch.compiler.is_compiling() else _local.own
    if own is not None:
        own[0].start(group, own[1], in_turn)
    if own is None or not in_turn:
        operation(*tensors, group=group, **options)
        return
    turns, number = own
    message = operation(*tensors, group=group, async_op=True, **options)
    turns.num_bytes = max([turns.num_bytes, *(each.nbytes for each in tensors if isinstance(each, torch.Tensor))])
    turns.finish(message, number)
