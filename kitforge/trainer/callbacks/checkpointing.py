"""Saves checkpoints: at the interval, at every new best, at the end; keeps the last few and the best."""

from __future__ import annotations

from pathlib import Path
from typing import final

from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel.replicas import describe_drift
from kitforge.core.parallel.world import World
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext, can_save_at_end

# Seconds that a rank which fails gives to the write that is under way; others wait for its end.
ABANDON_SECONDS = 1.0


@final
class CheckpointCallback(Callback):
    """Writes to `root`/step_N in the background. Give it after every callback whose state should be inside."""

    def __init__(self, root: Path, *, save_total_limit: int, world: World, num_increments: int = 0) -> None:
        self._root = root
        self._writer = CheckpointWriter(root, keep_last=save_total_limit, world=world)
        self._num_increments = num_increments
        self._saved: int | None = None
        self._best: int | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        """Save when due. A failure to write in the background is raised at the next save or at the end."""
        if event.kind == "start":
            self._best = run.state.best_step
            # A run that goes on is the one before it, whose protection may be gone with a process that died.
            if self._best is not None and step_folder(self._root, self._best).is_dir():
                self._writer.pin(self._best)
        if event.kind == "rollback":
            self._writer.wait()
        if event.kind in ("start", "rollback"):
            self._writer.attach(run.state.tables(), num_deltas=self._num_increments)
        is_new_best = event.kind == "evaluate" and run.state.best_step == run.state.cursor.step
        # While steps are skipped there is nothing new to keep, and a rollback needs what came before them.
        is_due = event.kind == "checkpoint" and run.state.consecutive_skips == 0
        # A run that fails within a step ends with weights and cursor of different steps.
        is_last = can_save_at_end(event, run)
        try:
            if is_due or is_last or is_new_best:
                self._save(run)
        finally:
            if event.kind == "end" and not event.is_clean and run.world.all_ranks is not None:
                self._writer.abandon(ABANDON_SECONDS)
            elif event.kind == "end":
                self._writer.close()

    def _save(self, run: RunContext) -> None:
        """Save the step unless it is saved already; a new best takes the protection of the one before."""
        step, best = run.state.cursor.step, run.state.best_step
        if step == self._saved:
            return
        self._saved = step
        # Each replica is written by one of its ranks, so that ones that differ would be mixed.
        drift = run.state.parallel.repair_replicas(dict(run.state.optimizer.tensors()), run.state.layouts())
        if drift:
            run.log_event("drift", f"replicas differed, and now are those of the first rank: {describe_drift(drift)}")
        self._writer.save(
            step,
            model=run.state.model_tensors(),
            optimizer=run.state.optimizer.tensors(),
            state=run.checkpoint_state(),
            keep=step == best,
            layouts=run.state.layouts(),
        )
        if best == step:
            if self._best not in (None, step):
                assert self._best is not None
                self._writer.unpin(self._best)
            self._best = step
