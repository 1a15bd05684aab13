"""Stops a run that no longer gets better; the loop then goes back to the best weights."""

from __future__ import annotations

from typing import Any, final

from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


@final
class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row that brought no new best."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._waited = 0

    def on_event(self, event: Event, run: RunContext) -> None:
        """Count evaluations since the best one. A run that had stopped before it was resumed stops again."""
        if event.kind not in ("start", "evaluate"):
            return
        if event.kind == "evaluate":
            self._waited = 0 if run.state.best_step == run.state.cursor.step else self._waited + 1
        if self._waited >= self.patience:
            run.state.result_step = run.state.best_step
            best = f"{run.options.monitor} was best at step {run.state.best_step} with {run.state.best:.5g}"
            run.stop(f"early stopping after {self._waited} evaluations without a new best: {best}")

    def state(self) -> dict[str, Any]:
        """How long it has waited."""
        return {"waited": self._waited}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._waited = state["waited"]
