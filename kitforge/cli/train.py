"""`kitforge train` and `kitforge finetune`."""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitforge.api import train_task
from kitforge.cli.command import INTERRUPTED, Invocation
from kitforge.cli.console import is_main_process
from kitforge.composition import Composition, compose_config
from kitforge.core.checkpoint.manifest import steps
from kitforge.core.parallel.rendezvous import launch_info
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.kits.kit import RunInputs
from kitforge.report.metrics import RunRecord, read_run
from kitforge.report.summary import best_evaluation, evaluated_by, metric_words


def compose_train(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of a training."""
    return compose_config(task, choices, ("serve",))


def compose_finetune(task: str, choices: Mapping[str, Any]) -> Composition:
    """The options of a training from the weights of a checkpoint. Raises ConfigError if there is none."""
    composition = compose_train(task, choices)
    if composition.values.get("checkpoint") is None:
        raise ConfigError("finetune needs initial weights", got="checkpoint=null", fix="add checkpoint=FOLDER")
    return composition


def train(chosen: Invocation) -> int:
    """Train, then print metrics, paths and further commands."""
    result = train_task(restarted(chosen.options), RunInputs(model_name=chosen.model_name), chosen.kit)
    if not is_main_process():
        return INTERRUPTED if result.was_interrupted else 0
    record = read_run(result.folder)
    show_sample(record)
    # The metric that selects the weights leads.
    metric, _ = evaluated_by(record) or ("", None)
    figures = metric_words(result.metrics, metric)
    width = max(15, *(len(name) for name, _ in figures))
    lines = [f"{name:<{width}}  {value}" for name, value in figures]
    if (best := best_evaluation(record)) is not None:
        lines.insert(1, f"{'best':<{width}}  {best.text}  ({metric} {best.detail})")
    if metric and record.eval[metric].steps[0] == 0:
        lines.append(f"{'before training':<{width}}  {record.eval[metric].values[0]:.4f}  ({metric})")
    lines += [f"{'checkpoint':<{width}}  {result.folder / 'checkpoints'}"]
    lines += [f"{'report':<{width}}  {result.folder / 'report.html'}"]
    say("\n".join(lines))
    plain, quoted = str(result.folder), shlex.quote(str(result.folder))
    if result.was_interrupted:
        say(f"interrupted; go on with the same command and output_dir={quoted} resume=auto")
        return INTERRUPTED
    next_steps = [each.replace(plain, quoted) for each in chosen.kit.next_steps(result.folder)]
    say("\n  ".join(["try next:", *next_steps]))
    return 0


def restarted(options: Any) -> Any:
    """The options of restarted ranks: resume=auto if the run has saved a checkpoint."""
    where = launch_info()
    if where is None or where.restarts == 0 or options.output_dir is None:
        return options
    has_saved = bool(steps(Path(options.output_dir) / "checkpoints"))
    return dataclasses.replace(options, resume="auto") if has_saved else options


def show_sample(record: RunRecord) -> None:
    """Print one sample of the latest evaluation, if there is any."""
    for sample in record.samples[0].samples[:1] if record.samples else ():
        console.print(f"\n{sample.prompt}", style="bold", markup=False, highlight=False, end="")
        console.print(f"{sample.text}\n", markup=False, highlight=False)
