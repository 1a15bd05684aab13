"""Feeds trainer.metric_for_best to the plateau schedule, which reduces the learning rate when it stalls."""

from kitforge.trainer.callbacks.callback import Callback, Event, RunContext


class PlateauCallback(Callback):
    """For `schedule.name=plateau`. The factor is part of the training state."""

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind != "evaluate" or run.options.metric_for_best not in event.record:
            return
        value = event.record[run.options.metric_for_best]
        before = run.state.plateau.factor
        after = run.state.plateau.observe(value if run.options.metric_for_best_mode == "min" else -value)
        if after != before:
            run.log_event(
                "plateau", f"{run.options.metric_for_best} stalls at {value:.5g}: learning rate times {after:g}"
            )
