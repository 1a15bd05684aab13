"""The number of threads of a compiled loop when several loops run at once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_lock = threading.Lock()
_num_reserving = 0


@contextmanager
def reserve_threads() -> Iterator[None]:
    """Within the block, loops of this thread and of the training each take their part of the cores.

    If both took all of them, each would wait for chunks that the other one delays.
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
    """Within the block, torch's operations run on this thread alone. Its worker threads would spin for milliseconds
    after each and slow down ours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads() -> int:
    """The number of threads for a loop that begins now; a later one may get another."""
    return max(1, torch.get_num_threads() // (1 + _num_reserving))
