"""The training loop. A step: accumulate gradients, check that they are finite, clip, update, call the callbacks."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.optim.build import Optimizer, build_optimizer
from kitforge.core.optim.groups import ParameterGroup
from kitforge.core.optim.schedules import Plateau, lr_scale
from kitforge.core.parallel.expert_load import LOAD, check_capacity, load_sums, move_biases
from kitforge.core.parallel.micro_batches import is_composed, run_micro_batches
from kitforge.core.parallel.offload import HostOptimizer
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.rank_errors import describe_error
from kitforge.core.parallel.world import World
from kitforge.foundation import device as devices
from kitforge.foundation import seed as seeds
from kitforge.foundation.dtype import DTYPES
from kitforge.foundation.errors import ConfigError, TrainingError
from kitforge.foundation.log import logger
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.trainer.callbacks.callback import Callback, Event
from kitforge.trainer.callbacks.profiler import loading
from kitforge.trainer.optimizer_step import drop_gradients, optimizer_step
from kitforge.trainer.options import RunOptions, TrainerOptions
from kitforge.trainer.precision import GradScaler, autocast, use_precision
from kitforge.trainer.resume import check_changes
from kitforge.trainer.run_description import describe_run
from kitforge.trainer.signals import interrupt_signals
from kitforge.trainer.state import TrainingState
from kitforge.trainer.task import Task

# Steps of a run without trainer.max_steps and trainer.epochs.
DEFAULT_MAX_STEPS = 300
# Steps in a row with gradients that are not finite, after which the run fails.
MAX_CONSECUTIVE_SKIPS = 25
_log = logger(__name__)


class Loop:
    """Trains a task. `config` is the whole nested configuration, kept in every checkpoint.

    A rank that trains nothing runs the same loop: its steps are empty, it saves nothing, and it ends with rank 0.
    """

    def __init__(
        self,
        task: Task,
        options: RunOptions,
        world: World,
        *,
        folder: Path | None = None,
        callbacks: Sequence[Callback] = (),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        devices.keep_malloc_arenas()
        devices.set_deterministic(options.deterministic)
        torch.manual_seed(options.seed)
        self.task = task
        self.options = _with_best_metric(options.trainer, task)
        self.folder = folder
        self.callbacks = list(callbacks)
        self.stop_reason: str | None = None
        self.progress_metrics = task.progress_metrics()
        self.max_steps = _max_steps(task, options)
        # About ten evaluations, unless the options say otherwise; a run of fewer steps is evaluated at its end.
        self._eval_every = self.options.eval_every or self.max_steps // 10 or None
        # A schedule that does not fit the run is refused here, before the run has a folder.
        lr_scale(options.schedule, 0, self.max_steps)
        self._run_options = options
        self.world = world
        self._config = dict(config or {})
        self.was_interrupted = False  # by a signal
        self._stop_requested = False
        self._resumed_from: Path | None = None
        self._config_changes: list[str] = []
        self._model = task.build(world)
        if world.replica > 0:
            # All ranks initialize from one seed; afterwards each data-parallel replica has its own random stream.
            torch.manual_seed(seeds.key(options.seed, "replica", world.replica))
        use_precision(self._model, options.precision, world.device)
        self._parallel = parallel_model_of(self._model, world)
        check_capacity(self._parallel.experts.values(), is_composed(task))
        self._parallel.broadcast_replicas()
        groups, optimizer = self._build_optimizer(task.parameter_groups(self.model, options.optimizer.weight_decay))
        self.state = TrainingState(
            model=self.model,
            parallel=self._parallel,
            optimizer=optimizer,
            scaler=GradScaler(options.precision),
            plateau=Plateau(options.schedule),
            world=world,
            groups=groups,
        )

    def _build_optimizer(
        self, named: Sequence[ParameterGroup]
    ) -> tuple[Sequence[ParameterGroup], Optimizer | HostOptimizer]:
        """The groups over what is trained of this rank's shards, and their optimizer."""
        parallel, options = self._parallel, self._run_options
        parallel.onload()
        trained = [name for group in named for name in group.names]
        if not (self.world.is_training and trained) or self.options.offload == "none":
            groups = parallel.local_groups(named)
            is_training, matrices = self.world.is_training, parallel.full_matrices()
            return groups, build_optimizer(groups, options.optimizer, matrices) if is_training else Optimizer((), ())
        offload = parallel.offload(
            trained,
            gradients=self.options.offload == "optimizer_and_gradients",
            fraction=self.options.offload_fraction,
            compute_dtype=DTYPES[options.precision],
        )
        groups = parallel.local_groups(named)
        return groups, HostOptimizer(groups, options.optimizer, offload)

    @property
    def model(self) -> nn.Module:
        """The network, with the weights of the last step: none is on its way from the host any more."""
        self._parallel.wait()
        return self._model

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint in `train`. Raises ConfigError for changed options that make an exact continuation
        impossible."""
        changes = check_changes(checkpoint.state["config"], self._config, allowed=self.options.allow_config_changes)
        self.task.load_state(checkpoint.state["task"])
        self.state.load_checkpoint(checkpoint)
        for callback in self.callbacks:
            callback.load_state(checkpoint.state["callbacks"].get(type(callback).__name__, callback.state()))
        self._resumed_from = checkpoint.folder
        self._config_changes = changes

    def train(self) -> dict[str, float]:
        """Train to the end and return the last metrics. Ctrl-C ends the run after the current step, with a
        checkpoint."""
        metrics: dict[str, float] = {}
        self._emit("start")
        # Readers of metrics.jsonl learn from this record which metric selects the weights.
        chosen = {name: getattr(self.options, name) for name in ("metric_for_best", "metric_for_best_mode")}
        self.log_event("run", describe_run(self, self.task, self._run_options), chosen)
        if self._resumed_from is not None:
            self.log_event("resume", f"goes on after step {self.state.cursor.step} of {self._resumed_from}")
        for change in self._config_changes:
            self.log_event("changed", change)
        still_here = iter(self.callbacks)
        with interrupt_signals(self._interrupt):
            try:
                if self.options.eval_first and self.state.cursor.step == 0 and self.state.last_eval_step is None:
                    metrics |= self._evaluate()
                metrics |= self._run()
                for callback in still_here:
                    callback.on_event(Event(kind="end"), self)
            except BaseException as error:
                # First, as the other ranks wait for this one.
                self.world.publish_failure(error)
                for callback in still_here:
                    try:
                        callback.on_event(Event(kind="end", is_clean=False), self)
                    # The error that ended the run is the one to raise.
                    except Exception as further:  # noqa: BLE001 (every callback gets its end event)
                        _log.error("%s, when the run failed: %s", type(callback).__name__, describe_error(further))
                raise
        metrics = self._restore_best(metrics)
        self._parallel.onload()
        if self.world.inference_ranks is not None:
            metrics = self.world.broadcast_object(metrics)
        self.task.on_run_end()
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Metrics of the evaluation set."""
        self.model.eval()
        try:
            with torch.no_grad(), autocast(self.world.device, self._run_options.precision):
                return self.task.evaluate(self.model)
        finally:
            self._parallel.reshard()
            self.model.train()

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.stop_reason = reason

    def log_event(self, event: str, message: str, further: Mapping[str, Any] | None = None) -> None:
        """Send an event to all callbacks, with `further` fields of its record."""
        record = {"kind": "event", "step": self.state.cursor.step, "event": event, "message": message}
        self._emit("note", record | dict(further or {}))

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table to all callbacks, for experiment trackers."""
        self._emit("table", {"name": name, "columns": list(columns), "rows": [list(row) for row in rows]})

    def checkpoint_state(self) -> dict[str, Any]:
        """The content of state.json."""
        return {
            "training": self.state.state_dict(),
            "task": self.task.state(),
            "callbacks": {type(callback).__name__: callback.state() for callback in self.callbacks},
            "config": self._config,
        }

    def _run(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        self.model.train()
        # Optimizer state is allocated before the first backward pass; later it would fragment the memory that the
        # activations of the next steps need.
        self.state.optimizer.init_state()
        self._follow_rank_zero()
        has_ended = self.state.cursor.step >= self.max_steps or self.stop_reason is not None
        steps = iter(()) if has_ended else self.task.steps(self.model, self.state.cursor)
        if self.state.cursor.step == 0:
            self._checkpoint(False)
        started = time.perf_counter()
        for step in loading(steps):
            self.state.is_consistent = False
            record = self._step(step)
            elapsed = time.perf_counter() - started
            self.state.seconds += elapsed
            self._accumulate_metrics(record, elapsed)
            self.state.is_consistent = True
            self._emit("step")
            number = self.state.cursor.step
            # A log interval that is interrupted is logged by the resumed run.
            last = number >= self.max_steps or (self.stop_reason is not None and not self.was_interrupted)
            if number % self.options.log_every == 0 or last:
                metrics |= self._log()
            if not math.isfinite(record["grad_norm"]):
                self._handle_skip(record["grad_norm"])
            elif record["skip"] is not None:
                self.log_event("skip", f"{record['skip']} in step {number}: weights unchanged")
            if self._eval_every is not None and number % self._eval_every == 0:
                metrics |= self._evaluate()
            self._follow_rank_zero()
            if last or self.stop_reason is not None:
                break
            self._checkpoint(self.options.checkpoint_every is not None and number % self.options.checkpoint_every == 0)
            started = time.perf_counter()
        if self.state.cursor.step == 0:
            raise TrainingError("the task yielded no step", expected="at least one", fix="check its data and cursor")
        if self.state.log_accumulator and not self.was_interrupted:
            metrics |= self._log()
        return metrics | self._finish(has_ended)

    def _checkpoint(self, is_due: bool) -> None:
        if is_due or self.task.needs_checkpoint(self.state.cursor.step, self.max_steps):
            self._emit("checkpoint")

    def _finish(self, has_ended: bool) -> dict[str, float]:
        """The last evaluation, unless this step has one, and the event that says why the run ends."""
        metrics: dict[str, float] = {}
        if self.was_interrupted:
            self.log_event("interrupt", f"stopped after step {self.state.cursor.step}; resume=auto continues from here")
        elif self.state.last_eval_step != self.state.cursor.step:
            metrics = self._evaluate()
        elif has_ended:
            # A resumed run that was already finished adds nothing to its files.
            metrics = self.evaluate()
        if self.stop_reason is not None and not self.was_interrupted:
            self.log_event("stop", self.stop_reason)
        if (best := self._step_to_restore()) is not None:
            self.log_event("restore", f"weights of step {best}, and their metrics", {"weights_of_step": best})
        return metrics

    def _step(self, step: Sequence[MicroBatch]) -> dict[str, Any]:
        """One optimizer step, or a skip. Returns sums, counts, gradient norms and learning rates."""
        state = self.state
        if not step:
            self._agree_to_stop()
            state.skipped += 1
            state.cursor = state.cursor.advance(samples=0, tokens=0)
            return {"sums": {}, "counts": {}, "grad_norm": 0.0, "skip": None, "last": {}}
        # Known to all ranks before the first forward pass: every micro-batch is divided by the count of the whole
        # batch.
        counts = self.world.sum(self.task.count(step))
        sums = self.world.sum(self._accumulate(step, counts))
        load = sums.pop(LOAD, None)
        sums |= {} if load is None else load_sums(load)
        self._agree_to_stop()
        rate = lr_scale(self._run_options.schedule, state.updates, self.max_steps) * state.plateau.factor
        learning_rate = self._run_options.optimizer.learning_rate
        skip = "nothing to learn from" if float(counts["loss"]) == 0 else self.task.skip_reason(sums, counts)
        drop_gradients(state, self.task.frozen_parts(step))
        bound, is_skipped = self.options.max_grad_norm, skip is not None
        norms, read = optimizer_step(state, rate, learning_rate, bound, sums=sums, is_skipped=is_skipped)
        if load is not None:
            choices = torch.tensor(read.pop("experts/choices"))
            counts |= {name: choices for name in read if name.startswith("experts/")}
            if not is_skipped and math.isfinite(norms["grad_norm"]):
                move_biases(self._parallel, load)
        if self.task.steps_read_weights:
            self._parallel.wait()
        own = {group.part: group.learning_rate for group in state.groups if group.learning_rate is not None}
        samples, tokens = int(counts.get("samples", 0)), int(counts.get("tokens", 0))
        state.cursor = state.cursor.advance(samples=samples, tokens=tokens)
        return {
            "sums": read,
            "counts": counts,
            "grad_norm": norms["grad_norm"],
            "skip": skip,
            "last": {"learning_rate": rate * learning_rate}
            | {f"learning_rate/{part}": rate * each for part, each in own.items()}
            | norms,
        }

    def _accumulate(self, step: Sequence[MicroBatch], counts: Sums) -> Sums:
        """Gradients of loss / count, summed over the micro-batches; returns the sums by name."""
        weight = self.state.scaler.scale / max(float(counts["loss"]), 1.0)
        precision = partial(autocast, self.world.device, self._run_options.precision)
        return run_micro_batches(self._parallel, self.task, step, weight, precision)

    def _handle_skip(self, norm: float) -> None:
        state = self.state
        self.log_event("skip", f"gradient norm {norm} at step {state.cursor.step}: weights unchanged")
        if state.consecutive_skips >= MAX_CONSECUTIVE_SKIPS:
            got = f"non-finite gradients in {state.consecutive_skips} steps in a row"
            raise TrainingError("the run diverges", got=got, fix="lower optimizer.learning_rate, or use precision=bf16")

    def _accumulate_metrics(self, record: dict[str, Any], elapsed: float) -> None:
        """Add the step to the sums of the current log interval."""
        window = self.state.log_accumulator
        for name, value in record["sums"].items():
            count = record["counts"].get(name, record["counts"]["loss"])
            window[name] = window.get(name, 0.0) + float(value)
            window[f"{name}/count"] = window.get(f"{name}/count", 0.0) + float(count)
        for name in ("samples", "tokens", "input_tokens"):
            if name in record["counts"]:
                window[f"time/{name}"] = window.get(f"time/{name}", 0.0) + float(record["counts"][name])
        window["time/seconds"] = window.get("time/seconds", 0.0) + elapsed
        window["steps"] = window.get("steps", 0.0) + 1
        for name, value in record["last"].items():
            window[f"last/{name}"] = value

    def _log(self) -> dict[str, float]:
        state, window = self.state, self.state.log_accumulator
        # A metric without a count in this interval has no mean.
        names = [name.removesuffix("/count") for name, value in window.items() if name.endswith("/count") and value]
        means = {name: window[name] / window[f"{name}/count"] for name in names}
        seconds = max(window["time/seconds"], 1e-9)
        line = {
            "kind": "train",
            "step": state.cursor.step,
            **({} if (epoch := self.task.epoch(state.cursor)) is None else {"epoch": epoch}),
            **({"tokens": state.cursor.tokens} if state.cursor.tokens else {"samples": state.cursor.samples}),
            **means,
            **self.task.position_metrics(state.cursor.samples),
            **{name.removeprefix("last/"): value for name, value in window.items() if name.startswith("last/")},
            "skipped": state.skipped,
            "time/seconds": state.seconds,
            "time/step_seconds": seconds / window["steps"],
            "time/memory_bytes": devices.peak_memory(self.world.device),
        }
        for name in ("input_tokens", "tokens", "samples"):
            if f"time/{name}" in window:
                line[f"time/{name}_per_second"] = window[f"time/{name}"] / seconds
        state.log_accumulator = {}
        self._emit("log", line)
        return {name: float(value) for name, value in means.items() if not name.startswith("experts/load/")}

    def _evaluate(self) -> dict[str, float]:
        started = time.perf_counter()
        metrics = self.evaluate()
        if not metrics:
            return {}
        state, monitor = self.state, self.options.metric_for_best
        if monitor is None or monitor not in metrics:
            raise ConfigError(
                "trainer.metric_for_best is not a metric of the evaluation",
                got=monitor,
                expected=f"one of {', '.join(sorted(metrics))}",
            )
        sign = 1 if self.options.metric_for_best_mode == "min" else -1
        if math.isfinite(metrics[monitor]) and (
            state.best_value is None or sign * metrics[monitor] < sign * state.best_value
        ):
            state.best_value, state.best_step = metrics[monitor], state.cursor.step
            state.best_metrics = {name: each if math.isfinite(each) else None for name, each in metrics.items()}
        state.last_eval_step = state.cursor.step
        line = {"kind": "eval", "step": state.cursor.step, **metrics}
        line["time/evaluation_seconds"] = time.perf_counter() - started
        self._emit("evaluate", line)
        return metrics

    def _step_to_restore(self) -> int | None:
        """The step of the best evaluation after early stopping; None if the last weights are the result."""
        best = self.state.result_step
        return None if best == self.state.cursor.step or self.folder is None or self.was_interrupted else best

    def _restore_best(self, metrics: dict[str, float]) -> dict[str, float]:
        """Load the weights of the best evaluation after early stopping; the metrics with those of that evaluation."""
        best = self._step_to_restore()
        if best is None or self.folder is None:
            return metrics
        if self.world.is_training:
            self.state.load_weights(open_checkpoint(step_folder(self.folder / "checkpoints", best), world=self.world))
        # Checkpoints of earlier versions keep no metrics.
        found = self.state.best_metrics or self.evaluate()
        return metrics | {name: math.nan if value is None else value for name, value in found.items()}

    def _emit(self, kind: Any, record: dict[str, Any] | None = None) -> None:
        event = Event(kind=kind, record=record or {})
        for callback in self.callbacks:
            callback.on_event(event, self)

    def _interrupt(self) -> None:
        self._stop_requested = True
        if self.world.all_ranks is None:
            self._agree_to_stop()

    def _agree_to_stop(self) -> None:
        """Signals reach ranks at different times; all ranks end after the same step."""
        if self.world.any(self._stop_requested):
            self.was_interrupted = True
            self.stop("interrupted")

    def _follow_rank_zero(self) -> None:
        """Tell the ranks that train nothing what only the others know: whether the run ends, and what was skipped."""
        if self.world.inference_ranks is not None:
            known = self.stop_reason, self.state.consecutive_skips
            self.stop_reason, self.state.consecutive_skips = self.world.broadcast_object(known)


def _with_best_metric(options: TrainerOptions, task: Task) -> TrainerOptions:
    """The options with the task's metric_for_best, unless another one is chosen."""
    own = task.metric_for_best()
    name = own.name if options.metric_for_best is None else options.metric_for_best
    mode = options.metric_for_best_mode or (own.mode if name == own.name else "min")
    return dataclasses.replace(options, metric_for_best=name, metric_for_best_mode=mode)


def _max_steps(task: Task, options: RunOptions) -> int:
    """Steps of the run: by max_steps, by epochs, or at most 300."""
    given, epochs = options.trainer.max_steps, options.trainer.epochs
    if given is not None and epochs is None and task.is_endless():
        return given
    steps = task.num_steps(1.0 if epochs is None else epochs)
    if steps is None and given is None:
        raise ConfigError(
            "the length of the training is unknown", got="trainer.max_steps=null", expected="a number of steps"
        )
    limit = DEFAULT_MAX_STEPS if epochs is None and given is None else None
    return min(value for value in (steps, given, limit) if value is not None)
