"""The step of a task for a plan: its own, over rows that stand in for data, on a network without values."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

from kitforge.core.parallel.plan.dry_run import data_values
from kitforge.core.parallel.plan.stages import num_traced
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.foundation.config import to_dict
from kitforge.foundation.types import MicroBatch
from kitforge.kits.kit import AnyKit, RunInputs
from kitforge.models.loading import StoredModel
from kitforge.trainer.loop import Loop
from kitforge.trainer.step_trace import DryStep, TracedTask
from kitforge.trainer.task import Task


def traced_task(
    kit: AnyKit, options: Any, config: Any, inputs: RunInputs[Any], stored: StoredModel | None = None
) -> TracedTask:
    """What is traced of the task that `kit` prepares, of networks like `config` with fewer blocks; with `stored` they
    are those of a checkpoint."""
    has_blocks = hasattr(config, "decoder")

    def step(world: World, num_blocks: int) -> DryStep:
        shallow = replace(config, num_layers=num_blocks) if has_blocks else config
        chosen, given = replace(options, model={"family": shallow.family, **to_dict(shallow)}), inputs
        if stored is not None:
            planned = replace(stored, config=shallow, blocks={})
            given = replace(inputs, open_model=lambda *_: planned)
        rendezvous = Rendezvous(chosen.parallel, world.device, None, None)
        with cache_of_its_own():
            prepared = kit.prepare(chosen, given, rendezvous, is_evaluation=False)
            return dry_step(kit, prepared.task(world)[0], prepared.options, world)

    def kinds(num_blocks: int) -> Sequence[object]:
        blocks: Sequence[object] = replace(config, num_layers=num_blocks).decoder().blocks if has_blocks else ()
        return blocks or range(num_blocks)

    return TracedTask(options=options, num_blocks=config.num_layers if has_blocks else 1, kinds=kinds, step=step)


def dry_step(kit: AnyKit, task: Task, options: Any, world: World) -> DryStep:
    """A step of the task, and the first micro-batch of an evaluation."""
    loop = Loop(task, options, world)
    with data_values():
        step = kit.dry_micro_batches(task, loop.model)
        evaluation: Any = getattr(task, "eval_micro_batches", None)
        held_out = None if evaluation is None else next(evaluation(loop.model), None)
    # Of each kind, of which the first are the largest, as many as are under way at once.
    most, seen, kept = num_traced(options.parallel.stages, len(step)), Counter[tuple[str, ...]](), list[MicroBatch]()
    for each in step:
        seen[tuple(each)] += 1
        kept += [each] if seen[tuple(each)] <= most else []
    further = {"rollout": ("keys and values", partial(kit.dry_generation, task, loop.model))}
    return DryStep(
        loop=loop, micro_batches=kept, num_micro_batches=len(step), eval_micro_batch=held_out, further=further
    )


def rows_at_once(options: Any) -> int:
    """The rows of a micro-batch."""
    own: int = -(-(options.data.batch_size or options.data.step_size) // options.parallel.num_replicas)
    return min(options.trainer.micro_batch_size or own, own)


@contextmanager
def cache_of_its_own() -> Iterator[None]:
    """Rows that stand in for data are cached in a folder that goes away."""
    before = os.environ.get("KITFORGE_CACHE")
    with TemporaryDirectory() as folder:
        os.environ["KITFORGE_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("KITFORGE_CACHE")
            os.environ |= {} if before is None else {"KITFORGE_CACHE": before}
