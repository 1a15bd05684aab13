"""A plugin for tests with a fault in them: one that hangs ends the process as one that failed does, and all together
end after a minute of processor time, whatever else the machine does."""

import faulthandler
import resource
import sys
from collections.abc import Iterator

import pytest

SECONDS = 120
resource.setrlimit(resource.RLIMIT_CPU, (60, 90))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fast tests take less than one second, and a loop that is compiled again less than this on a busy machine."""
    # Not through pytest's capture: the process is gone before it would be shown.
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=sys.__stderr__)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
