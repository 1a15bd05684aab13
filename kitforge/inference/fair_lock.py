"""A reentrant lock that threads acquire in the order of their requests."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A reentrant lock, first come, first served.

    `threading.RLock` can starve the others when one thread releases and acquires it in a loop, as one that steps an
    engine does.
    """

    def __init__(self) -> None:
        self._state = threading.Lock()  # guards the fields below
        self._owner: int | None = None
        self._depth = 0
        self._turns: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        me = threading.get_ident()
        with self._state:
            if self._owner is None or self._owner == me:
                self._owner = me
                self._depth += 1
                return
            turn = threading.Lock()
            turn.acquire()
            self._turns.append((me, turn))
        try:
            turn.acquire()
        except BaseException:
            # Interrupted while waiting: this thread must not be handed the lock.
            with self._state:
                if (me, turn) in self._turns:
                    self._turns.remove((me, turn))
                else:
                    self._pass_on()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._state:
            self._depth -= 1
            if not self._depth:
                self._pass_on()

    def _pass_on(self) -> None:
        if not self._turns:
            self._owner, self._depth = None, 0
            return
        self._owner, turn = self._turns.popleft()
        self._depth = 1
        turn.release()
