"""Writes report.html when a run ends, however it ends."""

from __future__ import annotations

from typing import final

from kitforge.report.page import write_report
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


@final
class ReportPage(Callback):
    """Give it after the metrics file, so that the last line is on the page."""

    def on_event(self, event: Event, run: RunContext) -> None:
        """Write the page at the end."""
        if event.kind == "end" and run.folder is not None:
            write_report([run.folder])
