"""Working memory that is kept, bags, and work shared among threads."""

import os
import threading
from typing import Any

import pytest
import torch

from kitforge.core.kernels.cpu_engine import numba_runtime as compiling
from kitforge.core.kernels.cpu_engine.numba_runtime import parallel_for
from kitforge.core.kernels.cpu_engine.threads import num_threads, reserve_threads
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.foundation.errors import DataError, ModelError
from tests.core.kernels.records import threads


def test_memory_is_laid_down_once() -> None:
    scratch = Workspace()
    first = scratch.take("rows", 10, 4)
    assert scratch.take("rows", 5, 8).data_ptr() == first.data_ptr()
    assert scratch.take("others", 10, 4).data_ptr() != first.data_ptr()
    assert scratch.take("rows", 10, 4, dtype=torch.int64).dtype == torch.int64


def test_memory_grows_when_more_is_asked_for() -> None:
    scratch = Workspace()
    small = scratch.take("rows", 10)
    large = scratch.take("rows", 1000, 2)
    assert large.shape == (1000, 2)
    assert scratch.take("rows", 10).data_ptr() == large.data_ptr() != small.data_ptr()
    assert scratch.take("rows", 0, 2).shape == (0, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("total", [0, 1, 2, 7, 100])
def test_pieces_cover_everything_once_and_in_order(total: int, count: int) -> None:
    with threads(count):
        pieces = parallel_for(lambda start, stop: list(range(start, stop)), total, 1)
    assert [number for piece in pieces for number in piece] == list(range(total))
    assert len(pieces) <= count


def test_little_work_stays_with_who_asked() -> None:
    with threads(4):
        assert parallel_for(lambda start, stop: threading.get_ident(), 99, 100) == [threading.get_ident()]


def test_a_piece_that_no_thread_has_begun_is_done_by_its_caller() -> None:
    may_end, own = threading.Event(), threading.get_ident()
    with threads(2):
        busy = compiling._pool(os.getpid(), 1).submit(may_end.wait, 20)
        pieces = parallel_for(lambda start, stop: (start, stop, threading.get_ident()), 10, 1)
        may_end.set()
        busy.result()
    assert pieces == [(0, 5, own), (5, 10, own)]


def test_threads_are_shared_out_among_those_who_work_beside_one_another() -> None:
    with threads(4):
        assert num_threads() == 4
        with reserve_threads():
            assert num_threads() == 2
            assert len(parallel_for(lambda start, stop: None, 10, 1)) == 2
            with reserve_threads(), reserve_threads(), reserve_threads(), reserve_threads():
                assert num_threads() == 1
        with pytest.raises(ValueError, match="gone"), reserve_threads():
            raise ValueError("gone")
        assert num_threads() == 4


def test_what_a_thread_raises_is_raised() -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ValueError(start)

    with threads(2), pytest.raises(ValueError, match="5"):
        parallel_for(work, 10, 1)


def test_a_forked_process_has_threads_of_its_own() -> None:
    with threads(2):
        parallel_for(lambda start, stop: None, 10, 1)
        child = os.fork()
        if child == 0:
            os._exit(len(parallel_for(lambda start, stop: None, 10, 1)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2


def test_a_loop_is_compiled_anew_where_nothing_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(function: object) -> None:
        raise RuntimeError(f"cannot cache function {function}: no locator available")

    def half(value: int) -> float:
        return value / 2

    monkeypatch.setattr(compiling, "FunctionCache", nowhere)
    made: Any = compiling.compiled(half)
    assert made(3) == 1.5 and not made.stats.cache_path


@pytest.mark.parametrize("places", [[-1], [0, 3], [2**62]])
def test_a_place_that_is_none_is_refused(places: list[int]) -> None:
    with pytest.raises(ModelError, match="an index is outside of the slots"):
        check_indices(torch.tensor(places), 3, "slots")


@pytest.mark.parametrize(
    "offsets", [torch.tensor([1, 2]), torch.tensor([0, 3, 2]), torch.tensor([0.0]), torch.tensor([], dtype=torch.int64)]
)
def test_what_are_no_offsets_is_refused(offsets: torch.Tensor) -> None:
    with pytest.raises(DataError, match="offsets of bags"):
        Bags(offsets=offsets)


def test_bags_of_another_number_of_ids_are_refused() -> None:
    bags = Bags(offsets=torch.tensor([0, 2, 5]), weights=torch.ones(5))
    bags.require(5)
    with pytest.raises(DataError, match="another number"):
        bags.require(4)
    with pytest.raises(DataError, match="differ in number"):
        Bags(offsets=torch.tensor([0, 2, 5]), weights=torch.ones(4)).require(5)
