"""What a run is about to do, in a few lines: its data, length, batch, parameters, device and folder."""

import math

from kitforge.trainer.callbacks.callback import RunContext
from kitforge.trainer.options import RunOptions
from kitforge.trainer.task import Task


def describe_run(run: RunContext, task: Task, options: RunOptions) -> str:
    """One line for each, such as "data  1,200 rows, 300 evaluation rows"."""
    sizes = task.data_sizes()
    batch = sizes.pop("batch", None)
    steps, per_epoch = run.max_steps, task.num_steps(1.0)
    epochs = f", {steps / per_epoch:.3g} epochs of {per_epoch:,}" if per_epoch else ""
    is_default = options.trainer.max_steps is None and options.trainer.epochs is None
    accumulated = ""
    if batch is not None:
        replicas = run.world.num_replicas
        part = math.ceil(batch / replicas)
        micro = min(run.options.micro_batch_size or part, part)
        accumulated = f"micro-batch {micro:,} x accumulation {math.ceil(part / micro):,} x replicas {replicas:,}"
    # Of whole tensors, also where this rank has a shard.
    layouts = run.state.parallel.layouts
    numbers = {name: math.prod(layouts[name].shape) for name in run.state.parallel.dtypes}
    frozen = sum(numbers.get(name, 0) for name, each in run.model.named_parameters() if not each.requires_grad)
    every = sum(numbers.values())
    trained = f"{every - frozen:,} of {every:,} trained" + (f" ({1 - frozen / every:.2%})" if frozen else "")
    # The layers of each stage of a pipeline, with their share of the products of a token, network by network.
    networks = []
    for stages in run.state.parallel.stage_layers.values():
        total = sum(each.products for each in stages)
        parts = (f"{each.layers.start}-{each.layers[-1]} ({each.products / total:.0%})" for each in stages)
        networks.append(f"layers {', '.join(parts)}")
    lines = {
        "data": ", ".join(f"{count:,} {name}" for name, count in sizes.items() if count),
        "length": f"{steps:,} steps{epochs}" + ("; trainer.epochs=1 is one pass over the data" if is_default else ""),
        "batch": "" if batch is None else f"{batch:,} = {accumulated}",
        "parameters": trained + ("; the rows of embedding tables come besides" if run.state.tables() else ""),
        "stages": "; ".join(networks),
        "learning": options.summary or "",
        "device": f"{run.world.device}, {options.precision}",
        "folder": str(run.folder or ""),
    }
    return "\n".join(f"{name:<12}{line}" for name, line in lines.items() if line)
