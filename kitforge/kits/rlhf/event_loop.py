"""The event loop of a run: all async rewards and steps of environments share it, as they may share connections."""

import asyncio
import threading
import weakref
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

import torch

# Seconds that cancelled tasks have to end.
_GRACE = 5.0


class EventLoop:
    """An event loop in a thread of its own, which the first call starts. Calls may come from any thread, also from one
    with a running loop (notebooks). `close` cancels what is pending; so does the end of this object's life."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: weakref.finalize[Any, EventLoop] | None = None

    def submit(self, value: Awaitable[Any]) -> Future[Any]:
        """Schedule an awaitable."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(target=_serve, args=(self._loop,), name="event loop", daemon=True)
                thread.start()
                self._stop = weakref.finalize(self, _stop, self._loop, thread)
                # A daemon thread ends with the interpreter.
                self._stop.atexit = False
            return asyncio.run_coroutine_threadsafe(_result(value), self._loop)

    def run(self, value: Awaitable[Any]) -> Any:
        """The result of an awaitable."""
        future = self.submit(value)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Cancel pending tasks and end the thread. A later call would start a new loop."""
        with self._lock:
            self._loop, stop = None, self._stop
        if stop is not None:
            stop()


async def _result(value: Awaitable[Any]) -> Any:
    return await value


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    # Per thread: as the caller, a function called here records no gradients.
    torch.set_grad_enabled(False)
    try:
        loop.run_forever()
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks, timeout=_GRACE))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    if thread is not threading.current_thread():
        thread.join(2 * _GRACE)
