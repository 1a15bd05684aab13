"""Whether a second thread is asked: by what calls took before, on a clock that the tests turn."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kitforge.core.kernels.cpu_engine import spin_barrier
from kitforge.core.kernels.cpu_engine.spin_barrier import ThreadAutotuner


class Machine:
    """Calls take as long as is said for them alone and shared."""

    def __init__(self) -> None:
        self.now, self.alone, self.shared = 0.0, 2.0, 1.0
        self.ways: list[bool] = []

    def run_on_threads(self, work: Callable[[], None], _count: int) -> None:
        self.now += self.shared - self.alone
        self.ways.append(True)
        work()

    def take(self, company: ThreadAutotuner, num_calls: int) -> float:
        """How many of that many calls were shared, as a part of one."""

        def work() -> None:
            self.now += self.alone

        self.ways = []
        for _ in range(num_calls):
            company.call("step", work)
        return len(self.ways) / num_calls


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    monkeypatch.setattr(spin_barrier, "run_on_threads", machine.run_on_threads)
    monkeypatch.setattr("time.perf_counter", lambda: machine.now)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    yield machine
    monkeypatch.undo()


def test_the_faster_way_is_taken_and_the_other_now_and_then(machine: Machine) -> None:
    company = ThreadAutotuner()
    assert machine.take(company, ThreadAutotuner.NUM_TRIALS) == 0.5
    assert machine.take(company, 1000) > 0.97
    machine.shared = 9.0
    assert machine.take(company, 1000) < 0.05
    machine.shared = 1.0
    assert machine.take(company, 1000) > 0.9


def test_a_single_slow_call_changes_nothing(machine: Machine) -> None:
    company = ThreadAutotuner()
    machine.take(company, ThreadAutotuner.NUM_TRIALS + 1)
    machine.shared = 40.0
    machine.take(company, 1)
    machine.shared = 1.0
    assert machine.take(company, 50) == 1.0


@pytest.mark.parametrize(("threads", "processors"), [(1, 2), (2, 1)])
def test_nobody_is_asked_where_there_is_one_thread(
    threads: int, processors: int, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert machine.take(ThreadAutotuner(), 100) == 0.0
