"""What a run is about to do, in a few lines: its data, length, batch, parameters, device and folder."""

from __future__ import annotations

import math

from kitforge.trainer.callbacks.callback import RunContext
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task


def describe_run(run: RunContext, task: Task, options: RunOptions) -> str:
    """One line for each: "data  1,200 rows, 300 evaluation rows"."""
    sizes = ", ".join(f"{count:,} {name}" for name, count in task.data_sizes().items())
    lines = {
        "data": sizes,
        "length": _length(run, task, options),
        "batch": _batch(run, task),
        "parameters": _parameters(run),
        "learning": options.summary or "",
        "device": f"{run.world.device}, {options.precision}",
        "folder": "" if run.folder is None else str(run.folder),
    }
    return "\n".join(f"{name:<12}{line}" for name, line in lines.items() if line)


def _length(run: RunContext, task: Task, options: RunOptions) -> str:
    steps, per_epoch = run.max_steps, task.num_steps(1.0)
    chosen = options.trainer
    is_default = chosen.max_steps is None and chosen.epochs is None
    words = f"{steps:,} steps" + (" by default" if is_default else "")
    if per_epoch:
        words += f", {steps / per_epoch:.3g} epochs of {per_epoch:,}"
    if is_default:
        words += "; trainer.epochs=1 is one pass over the data"
    return words


def _batch(run: RunContext, task: Task) -> str:
    """The samples of a step: a micro-batch, times those that are accumulated, times the replicas."""
    size, micro, replicas = task.batch_size(), run.options.micro_batch_size, run.world.num_replicas
    if size is None:
        return ""
    part = math.ceil(size / replicas)
    micro = part if micro is None else min(micro, part)
    accumulated = math.ceil(part / micro)
    return f"{size:,} = micro-batch {micro:,} x accumulation {accumulated:,} x ranks {replicas:,}"


def _parameters(run: RunContext) -> str:
    """Sizes of whole tensors, also where this rank has a shard."""
    layouts = run.state.parallel.layouts
    sizes = {name: math.prod(layouts[name].shape) for name in run.state.parallel.dtypes}
    frozen = sum(sizes.get(name, 0) for name, each in run.model.named_parameters() if not each.requires_grad)
    every = sum(sizes.values())
    share = f"{every - frozen:,} of {every:,} trained" + (f" ({1 - frozen / every:.2%})" if frozen else "")
    return share + ("; the rows of embedding tables come besides" if run.state.tables() else "")
