"""Saves checkpoints: every N steps, at every new best metric, and at the end; keeps the last ones and the best."""

import math
from pathlib import Path

from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel.world import World
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext, can_save_at_end

# Seconds that a failing rank waits for its write in progress, as the other ranks wait for it.
ABANDON_SECONDS = 1.0


class CheckpointCallback(Callback):
    """Writes to `root`/step_N in the background. It comes after all callbacks whose state is saved."""

    def __init__(self, root: Path, *, save_total_limit: int, world: World, num_increments: int = 0) -> None:
        self._root = root
        self._writer = CheckpointWriter(root, keep_last=save_total_limit, world=world)
        self._num_increments = num_increments
        self._saved: int | None = None
        self._best: int | None = None
        self._has_warned = False

    def on_event(self, event: Event, run: RunContext) -> None:
        """Save when due. An error of a background write is raised at the next save or at the end."""
        if event.kind == "start":
            self._best = run.state.best_step
            # The pin of the best checkpoint may be gone with a process that died.
            if self._best is not None and step_folder(self._root, self._best).is_dir():
                self._writer.pin(self._best)
            self._writer.attach(run.state.tables(), num_deltas=self._num_increments)
        value = event.record.get(str(run.options.metric_for_best), 0.0)
        if event.kind == "evaluate" and not self._has_warned and not math.isfinite(value):
            self._has_warned = True
            run.log_event("best", f"{run.options.metric_for_best} is {value}, so it is not compared with the best one")
        is_new_best = event.kind == "evaluate" and run.state.best_step == run.state.cursor.step
        # Skipped steps have nothing new to save.
        is_due = event.kind == "checkpoint" and run.state.consecutive_skips == 0
        # Within a step, weights and cursor may belong to different steps.
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
        """Save the step once; a new best checkpoint is pinned instead of the previous one."""
        step, best = run.state.cursor.step, run.state.best_step
        if step == self._saved:
            return
        self._saved = step
        if not run.world.is_training:
            # What the other ranks gather from this one.
            run.checkpoint_state()
            return
        # Shards come from different replicas, so replicas must be equal.
        drift = run.state.parallel.repair_replicas(dict(run.state.optimizer.tensors()), run.state.layouts())
        if drift:
            named = [f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in list(drift.items())[:8]]
            words = "; ".join(named) + (f"; and {len(drift) - 8} more" if len(drift) > 8 else "")
            run.log_event("drift", f"replicas differed and were set to those of the first rank: {words}")
        self._writer.save(
            step,
            model=run.state.parallel.tensors(),
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
