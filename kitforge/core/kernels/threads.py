"""How many threads a loop may take, when loops run beside one another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_num_reserving = 0


@contextmanager
def reserve_threads() -> Iterator[None]:
    """While the block lasts, this thread works beside the training, and the cores are shared out among both.

    Where both ask for all of them, each waits for pieces of its loops that the other's have put off.
    """
    global _num_reserving
    with _lock:
        _num_reserving += 1
    try:
        yield
    finally:
        with _lock:
            _num_reserving -= 1


@contextmanager
def single_thread() -> Iterator[None]:
    """While the block lasts, torch's operations in this thread take no other. Those that they wake go on spinning for
    milliseconds, in the way of ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads() -> int:
    """Threads for a loop that begins now. It may be another number a moment later."""
    return max(1, torch.get_num_threads() // (1 + _num_reserving))
