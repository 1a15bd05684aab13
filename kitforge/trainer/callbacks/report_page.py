"""Writes report.html at the end of a run, also after a failure."""

from __future__ import annotations

from typing import final

from kitforge.report.page import write_report
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


@final
class ReportPage(Callback):
    """It comes after the metrics file, whose last line it shows."""

    def on_event(self, event: Event, run: RunContext) -> None:
        """Write the page at the end."""
        if event.kind == "end" and run.folder is not None:
            write_report([run.folder])
