"""Replay of a step: trains it again from the kept rollouts and the checkpoint before it."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import find_tokenizer
from kitforge.foundation.errors import CheckpointError, ConfigError, DataError
from kitforge.kits.kit import ReplayResult
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.reinforcement.ppo import RolloutTask
from kitforge.kits.rlhf.reinforcement.rollout_log import first_rollout, logged_rollouts, read_rollouts
from kitforge.kits.rlhf.role_ranks import RoleRanksOptions
from kitforge.kits.rlhf.roles.model_loading import load_policy
from kitforge.kits.rlhf.tasks import Inputs, TaskBuilder, TaskInputs, task_inputs_of
from kitforge.report.metrics import read_run
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.loop import Loop


def replay(
    folder: Path, step: int, options: RLOptions, prepare: Callable[[TaskInputs[Any]], TaskBuilder]
) -> ReplayResult:
    """Train from the newest checkpoint before `step` up to it. Nothing is generated, scored or written.

    Raises DataError if the run has not logged the step or kept its rollouts, CheckpointError without a checkpoint.
    """
    recorded = _recorded(folder, step)
    root = folder / "checkpoints"
    _check_replayable(folder, step, options)
    start = max(each for each in steps(root) if each < step)
    checkpoint = open_checkpoint(step_folder(root, start))
    device = torch.device("cpu") if options.device == "auto" else torch.device(options.device)
    trainer = dataclasses.replace(
        options.trainer, allow_config_changes=True, allow_data_changes=True, progress=False, eval_every=None
    )
    options = dataclasses.replace(
        options,
        trainer=trainer,
        parallel=ParallelConfig(),
        role_ranks=RoleRanksOptions(),
        checkpoint=None,
        device=str(device),
    )
    inputs = Inputs(
        # A replay needs only the number of prompts.
        train_dataset=[{"prompt": [0]}] * checkpoint.state["task"]["num_rows"],
        model=load_policy(checkpoint.folder, device, options.compile_level),
        processor=find_tokenizer(folder),
        roles={"reward": _no_reward},
    )
    options = dataclasses.replace(
        options, data=dataclasses.replace(options.data, train=None, eval=None, eval_fraction=0.0)
    )
    task = cast(RolloutTask, prepare(task_inputs_of(options, inputs, device)).task(World(device=device))[0])
    task.recorded = lambda number: read_rollouts(folder, number)
    watch = _StopAfterStep(step)
    loop = Loop(task, options, World(device=device), callbacks=[watch])
    loop.resume(checkpoint)
    loop.train()
    return ReplayResult(step=step, start=start, recorded=recorded, replayed=watch.metrics)


def _check_replayable(folder: Path, step: int, options: RLOptions) -> None:
    """Raise CheckpointError without a checkpoint before the step, DataError without the rollouts since then."""
    root, per_batch, most = folder / "checkpoints", options.rl.updates_per_rollout, options.rollout.keep_rollout_files
    kept, before = set(logged_rollouts(folder)), [each for each in steps(root) if each < step]
    needed = range(first_rollout(before[-1], per_batch) if before else 0, (step - 1) // per_batch + 1)
    if before and kept.issuperset(needed):
        return
    reachable = set[int]()
    for start in steps(root):
        # From a checkpoint up to the first rollout batch that was not kept.
        number = first_rollout(start, per_batch)
        while number in kept:
            number += 1
        reachable |= set(range(start + 1, number * per_batch + 1))
    expected = f"a step such as {', '.join(map(str, sorted(reachable)[-5:]))}" if reachable else None
    if before:
        raise DataError(
            f"the rollouts between checkpoint {before[-1]} and step {step} were not kept",
            got=f"rollout batches {', '.join(map(str, sorted(kept))) or 'none'} in {folder}",
            expected=expected or f"rollout batches {needed[0]} to {needed[-1]}",
            fix=f"train with rollout.keep_rollout_files={len(needed)}",
        )
    last = max(read_run(folder).train["loss"].steps)
    every = min(max(most, 1) * per_batch, step - 1)
    fix = "train with trainer.eval_first=true, which saves the weights before step 1 as the best so far"
    if every:
        keep = last // every - (step - 1) // every + 2
        fix = f"train with trainer.checkpoint_every={every} trainer.save_total_limit={keep}"
    raise CheckpointError(
        f"there is no checkpoint before step {step}",
        got=f"steps {', '.join(map(str, steps(root))) or 'none'} in {root}",
        expected=expected,
        fix=fix,
    )


class _StopAfterStep(Callback):
    """Stops the run after a step and keeps its metrics."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.metrics: dict[str, float] = {}

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step" and run.state.cursor.step == self._step:
            run.stop("the requested step was replayed")
        if event.kind == "log" and run.state.cursor.step == self._step:
            self.metrics = _numeric_metrics(event.record)


def _recorded(folder: Path, step: int) -> dict[str, float]:
    run = read_run(folder)
    logged = run.train["loss"].steps if "loss" in run.train else ()
    if step not in logged:
        near = sorted(sorted(set(logged)), key=lambda each: abs(each - step))[:5]
        raise DataError(
            f"the run has no metrics of step {step}",
            got=f"steps up to {max(logged, default=0)}",
            expected=f"a step such as {', '.join(map(str, sorted(near)))}" if near else "a run that has logged steps",
        )
    # A step may be logged twice, before and after a rollback: the last values count.
    found = {name: dict(zip(series.steps, series.values, strict=True)) for name, series in run.train.items()}
    return _numeric_metrics({name: values[step] for name, values in found.items() if step in values})


def _numeric_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in ("kind", "step") and not name.startswith("time/") and isinstance(value, (int, float))
    }


def _no_reward() -> list[float]:
    raise ConfigError("a replay scores nothing anew", fix="this is a mistake in Kitforge")
