"""Writes report.html while a run trains, and at its end, also after a failure."""

import time
from contextlib import suppress

from kitforge.foundation.errors import DataError
from kitforge.report.page import write_report
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

# The least seconds between two pages of a run that trains, by the event that may bring one.
_PAUSES = {"evaluate": 10.0, "log": 60.0}
# A page takes at most this part of the time.
_LARGEST_FRACTION = 0.02


class ReportPage(Callback):
    """It comes after the metrics file, whose last line it shows."""

    def __init__(self) -> None:
        self._written, self._seconds = time.monotonic(), 0.0

    def on_event(self, event: Event, run: RunContext) -> None:
        """Write the page when it is due. While the run lives, the page loads itself anew."""
        if run.folder is None:
            return
        if event.kind == "end":
            write_report([run.folder])
        started = time.monotonic()
        pause = max(_PAUSES.get(event.kind, float("inf")), self._seconds / _LARGEST_FRACTION)
        if started - self._written >= pause:
            # The page of the end raises what cannot be written, when nothing is lost by it.
            with suppress(DataError, OSError):
                write_report([run.folder], is_live=True)
            self._written = time.monotonic()
            self._seconds = self._written - started
