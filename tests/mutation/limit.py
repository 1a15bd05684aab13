"""A plugin for tests with a fault in them: one that hangs ends the process as one that failed does, and all together
end after a minute of processor time, whatever else the machine does. Hypothesis looks for no smaller example."""

import faulthandler
import resource
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

# Of one test: it waits, or it computes. Fast tests take less than one second, and a loop that is compiled again less
# than this on a busy machine.
SECONDS, CPU_SECONDS = 120, 40
resource.setrlimit(resource.RLIMIT_CPU, (60, 90))


def pytest_configure() -> None:
    """After the profile of `tests/conftest.py`, before a test is decorated."""
    settings.register_profile("planted", settings.default, phases=[Phase.explicit, Phase.generate])
    settings.load_profile("planted")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that waits too long ends with its trace, one that computes too long by SIGPROF."""
    # Not through pytest's capture: the process is gone before it would be shown.
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.cancel_dump_traceback_later()
