"""Collective work that succeeds on all ranks or fails on all ranks."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from kitforge.core.parallel.rank_errors import explain
from kitforge.foundation.errors import CheckpointError, KitforgeError

T = TypeVar("T")
# all_gather_object: from a value to the values of all ranks.
AllGather = Callable[[Any], list[Any]]


def collective_try(work: Callable[[], T], agree: AllGather, error: type[KitforgeError] = CheckpointError) -> list[T]:
    """The results of `work` on all ranks. If it raises `error` on some, all ranks raise that of the first one.

    Another exception is a bug: it propagates on its rank, after the other ranks have been notified. Raises PeerError if
    another rank has ended.
    """
    result: T | None = None
    failure: KitforgeError | None = None
    message: str | None = None
    try:
        result = work()
    except error as caught:
        failure, message = caught, str(caught)
    except BaseException as caught:
        message = f"a rank failed in a way that was not foreseen: {type(caught).__name__}: {caught}"
        raise
    finally:
        answers = all_gather_or_explain((message, result), agree)
    first = next((message for message, _ in answers if message is not None), None)
    if first is None:
        return [cast(T, answer) for _, answer in answers]
    raise failure if failure is not None and str(failure) == first else error(first)


def local_try(work: Callable[[], T], agree: AllGather) -> T:
    """`collective_try` with the result of this rank only; no results are sent."""
    results: list[T] = []
    collective_try(lambda: results.append(work()), agree)
    return results[0]


def all_gather_or_explain(value: T, agree: AllGather) -> list[T]:
    """What `agree` makes of the value. Raises PeerError when another rank is gone."""
    try:
        return agree(value)
    except RuntimeError as cause:
        explained = explain(cause)
        if explained is None:
            raise
        raise explained from cause
