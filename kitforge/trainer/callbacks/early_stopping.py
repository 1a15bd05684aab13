"""Stops a run that no longer gets better; the loop then goes back to the best weights."""

from __future__ import annotations

from typing import Any, final

from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


@final
class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row that brought no new best."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._num_without_improvement = 0

    def on_event(self, event: Event, run: RunContext) -> None:
        """Count evaluations since the best one. A run that had stopped before it was resumed stops again."""
        if event.kind not in ("start", "evaluate"):
            return
        if event.kind == "evaluate":
            self._num_without_improvement = (
                0 if run.state.best_step == run.state.cursor.step else self._num_without_improvement + 1
            )
        if self._num_without_improvement >= self.patience:
            run.state.result_step = run.state.best_step
            best = (
                f"{run.options.metric_for_best} was best at step {run.state.best_step} with {run.state.best_value:.5g}"
            )
            run.stop(f"early stopping after {self._num_without_improvement} evaluations without a new best: {best}")

    def state(self) -> dict[str, Any]:
        """How long it has waited."""
        return {"num_without_improvement": self._num_without_improvement}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
        self._num_without_improvement = state["num_without_improvement"]
