"""The bytes of a real training step by torch's own profiler, which shares no code with the trace of `plan`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kitforge.composition import compose_config
from kitforge.core.kernels.dispatch import watching_kernels
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import composed_loss
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.plan.work import StepWork, WorkTrace
from kitforge.core.parallel.world import World
from kitforge.kits.dry_task import rows_at_once
from kitforge.kits.registry import kit_of
from kitforge.trainer.loop import Loop
from kitforge.trainer.step_trace import DryStep, step_runner, trace_step
from kitforge.verify import foreseen

SMALL = {"device": "cpu", "model.vocab_size": 259, "trainer.max_steps": 9, "data.sequence_length": 64}
training_peak = foreseen.step_peak


def options_of(choices: dict[str, Any], task: str = "text_generation") -> Any:
    has_tokens = task not in ("image_classification", "recommendation")
    unknown = () if has_tokens else ("data.sequence_length", "model.vocab_size")
    shared = {name: value for name, value in SMALL.items() if name not in unknown}
    return kit_of(task).read_options(compose_config(task, shared | choices).values)


def traced(
    options: Any, index: int = 0, *, by_relay: bool = False, device_type: str = "cpu", expert_skew: float = 1.0
) -> StepMemory:
    """Of the first rank with that index along `pipeline`."""
    trace = MemoryTrace(device_type, is_building=True)
    with dry_world(options.parallel, options.precision, index, device_type, expert_skew) as world, trace:
        return trace_step(step_of(options, world, by_relay=by_relay), options, trace)


def step_of(options: Any, world: World, *, by_relay: bool = False) -> DryStep:
    """The step of a task, as it is or by a loss that gives no `inputs`."""
    task = kit_of(options.task).plan(options)
    step = task.step(world, task.num_blocks)
    if by_relay:
        step.loop.task.loss = functools.partial(composed_loss, step.loop.task)  # type: ignore[method-assign]
    return step


def work_of(options: Any, index: int = 0, depth: int | None = None, device_type: str = "cpu") -> StepWork:
    """What the first rank with that index along `pipeline` does, whose network may have fewer blocks."""
    with dry_world(options.parallel, options.precision, index, device_type) as world:
        work = WorkTrace(device_type, options.precision, world.mesh)
        trace = MemoryTrace(device_type, work, is_building=True)
        with watching_kernels(work.counted), trace:
            task = kit_of("text_generation").plan(dataclasses.replace(options, device=device_type))
            step = task.step(world, depth or task.num_blocks)
            trace_step(step, options, trace)
    return work.passes


def measured(rank: int, options: Any, by_relay: bool = False) -> int:
    """Bytes at rest, and above them the most at once in a step, of this rank, where that is the least."""
    return measured_range(rank, options, runs=1 + dist.is_initialized(), by_relay=by_relay)[0]


def world_of(options: Any) -> World:
    """On CPUs, of as many ranks as there are."""
    mesh = Mesh(options.parallel, "cpu") if options.parallel.world_size > 1 else None
    return World(device=torch.device("cpu"), mesh=mesh).with_precision(options.precision)


def real_step(options: Any) -> tuple[Loop, Callable[[], None]]:
    """The loop of a network with weights and moments, and a function that takes a whole step."""
    step = step_of(options, world_of(options))
    own, rows = -(-options.data.batch_size // options.parallel.num_replicas), rows_at_once(options)
    micro_batches = [step.micro_batches[0]] * -(-own // rows)
    return step.loop, step_runner(dataclasses.replace(step, micro_batches=micro_batches), options)


def measured_range(_rank: int, options: Any, runs: int = 2, by_relay: bool = False) -> tuple[int, int]:
    """See `kitforge.verify.foreseen.measured_range`."""
    world = world_of(options)
    found = foreseen.measured_range(lambda: step_of(options, world, by_relay=by_relay), options, runs)
    if dist.is_initialized():
        dist.barrier()
    return found
