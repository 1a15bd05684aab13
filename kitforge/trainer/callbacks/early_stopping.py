"""Early stopping; the loop then restores the best weights."""

from typing import Any

from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


class EarlyStopping(Callback):
    """Stops after `patience` consecutive evaluations without a new best."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._num_without_improvement = 0

    def on_event(self, event: Event, run: RunContext) -> None:
        """Count evaluations since the best one. A stopped run that is resumed stops again."""
        if event.kind not in ("start", "evaluate"):
            return
        if event.kind == "evaluate":
            self._num_without_improvement = (
                0 if run.state.best_step == run.state.cursor.step else self._num_without_improvement + 1
            )
        # A run that is resumed with more patience goes on, and its last weights may be the result.
        run.state.result_step = None
        if self._num_without_improvement >= self.patience:
            run.state.result_step = run.state.best_step
            name, step, value = run.options.metric_for_best, run.state.best_step, run.state.best_value
            # Without a finite value none was best, and the weights stay those of the last step.
            best = f"{name} was never finite" if value is None else f"{name} was best at step {step} with {value:.5g}"
            run.stop(f"early stopping after {self._num_without_improvement} evaluations without a new best: {best}")

    def state(self) -> dict[str, Any]:
        """Evaluations since the best one."""
        return {"num_without_improvement": self._num_without_improvement}

    def load_state(self, state: dict[str, Any]) -> None:
        self._num_without_improvement = state["num_without_improvement"]
