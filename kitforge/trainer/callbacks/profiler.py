"""Profiles a few early steps with torch.profiler, on every rank: what `kitforge profile` reads, and a torch trace and a
table of the ten most expensive operators of rank 0."""

import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch.autograd.profiler import record_function

from kitforge.core.parallel.collectives import group_size
from kitforge.foundation import device as devices
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json
from kitforge.report.rank_trace import DATA, STEP, reduce_trace
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext

StepT = TypeVar("StepT")


class Profiler(Callback):
    """Writes `folder`/rank-00000.json of each rank, and of rank 0 trace.json and top_ten.txt, from the steps of the
    session that `steps` names: the first, which is warm-up, and the last."""

    def __init__(self, folder: Path, steps: tuple[int, ...]) -> None:
        self._folder, self._steps = folder, steps
        self._seen, self._run = 0, ""
        self._profile: torch.profiler.profile | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "start":
            self._run = run.world.broadcast_object(uuid.uuid4().hex[:12])
        elif event.kind == "step":
            self._seen += 1
        is_boundary = event.kind in ("start", "step")
        if is_boundary and self._seen == self._steps[0] - 1:
            self._profile = torch.profiler.profile()
            self._profile.start()
        if self._profile is None:
            return
        if is_boundary:
            with record_function(f"{STEP}{run.state.cursor.step}"):
                pass
        if event.kind == "end" or (is_boundary and self._seen == self._steps[1]):
            self._profile.stop()
            self._write(self._profile, run)
            self._profile = None

    def _write(self, profile: torch.profiler.profile, run: RunContext) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        rank, has_ranks = run.world.rank, run.world.all_ranks is not None
        with tempfile.TemporaryDirectory() as folder:
            path = (self._folder if rank == 0 else Path(folder)) / "trace.json"
            profile.export_chrome_trace(str(path))
            trace = parse_json(path.read_bytes())
        # Only gloo needs the flight recorder: NCCL's kernels name their group and size.
        recorder = torch._C._distributed_c10d
        flights = parse_json(recorder._dump_fr_trace_json())["entries"] if has_ranks else []  # type: ignore[attr-defined]
        reduce_trace(
            trace,
            flights,
            run=self._run,
            rank=rank,
            num_ranks=group_size(run.world.all_ranks),
            peak_memory=devices.peak_memory(run.world.device),
        ).write(self._folder)
        if rank > 0:
            return
        on_device = any(event.self_device_time_total > 0 for event in profile.key_averages())
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=10, max_name_column_width=60)
        write_text(self._folder / "top_ten.txt", table)


def loading(steps: Iterator[StepT]) -> Iterator[StepT]:
    """The same steps; a profile shows how long each takes to come."""
    while True:
        with record_function(DATA):
            step = next(steps, None)
        if step is None:
            return
        yield step
