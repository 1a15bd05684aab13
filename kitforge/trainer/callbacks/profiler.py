"""Profiles a few early steps with torch.profiler: a Chrome trace and a table of the ten most expensive ops."""

from pathlib import Path

import torch

from kitforge.foundation.files import write_text
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

FIRST_STEP, NUM_STEPS = 3, 3


class Profiler(Callback):
    """Writes `folder`/trace.json and `folder`/top_ten.txt from steps 3 to 5 of the session."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = 0
        self._profile: torch.profiler.profile | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        """Start before the third step, stop after the fifth or at the end."""
        if event.kind == "step":
            self._seen += 1
        if event.kind == "step" and self._seen == FIRST_STEP - 1:
            self._profile = torch.profiler.profile()
            self._profile.start()
        elif self._profile is not None and (event.kind == "end" or self._seen == FIRST_STEP - 1 + NUM_STEPS):
            self._profile.stop()
            self._write(self._profile)
            self._profile = None

    def _write(self, profile: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(self._folder / "trace.json"))
        on_device = any(event.self_device_time_total > 0 for event in profile.key_averages())
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60)
        write_text(self._folder / "top_ten.txt", table)
