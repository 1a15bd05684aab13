"""The bytes of a real training step by torch's own profiler, which shares no code with the trace of `plan`."""

import dataclasses
import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from kitforge.composition import compose_config
from kitforge.core.kernels.dispatch import watching_kernels
from kitforge.core.parallel.fsdp import local_tensor
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import composed_loss
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.plan.memory import StepMemory
from kitforge.core.parallel.plan.work import StepWork, WorkTrace
from kitforge.core.parallel.world import World
from kitforge.kits.planning import rows_at_once
from kitforge.kits.registry import kit_of
from kitforge.trainer.loop import Loop
from kitforge.trainer.step_trace import DryStep, step_runner, trace_step

SMALL = {"device": "cpu", "model.vocab_size": 259, "trainer.max_steps": 9, "data.sequence_length": 64}


def options_of(choices: dict[str, Any]) -> Any:
    return kit_of("text_generation").read_options(compose_config("text_generation", SMALL | choices).values)


def traced(options: Any, index: int = 0, *, by_relay: bool = False) -> StepMemory:
    """Of the first rank with that index along `pipeline`."""
    with dry_world(options.parallel, options.precision, index) as world:
        return trace_step(step_of(options, world, by_relay=by_relay), options, world, "cpu")


def step_of(options: Any, world: World, *, by_relay: bool) -> DryStep:
    """The step of text generation, as it is or by a loss that gives no `inputs`."""
    task = kit_of("text_generation").plan(options)
    step = task.step(world, task.num_blocks)
    if by_relay:
        step.task.loss = functools.partial(composed_loss, step.task)  # type: ignore[method-assign]
    return step


def work_of(options: Any, index: int = 0, depth: int | None = None, device_type: str = "cpu") -> StepWork:
    """What the first rank with that index along `pipeline` does, whose network may have fewer blocks."""
    with dry_world(options.parallel, options.precision, index) as world:
        work = WorkTrace(device_type, options.precision, world.mesh)
        with watching_kernels(work.counted):
            task = kit_of("text_generation").plan(dataclasses.replace(options, device=device_type))
            step = task.step(world, depth or task.num_blocks)
        trace_step(step, options, world, device_type, work)
    return work.passes


def training_peak(memory: StepMemory) -> int:
    """The peak of the step without the evaluation after it."""
    return max(sum(sizes.values()) for name, sizes in memory.moments.items() if name != "evaluation")


def measured(rank: int, options: Any, by_relay: bool = False) -> int:
    """Bytes at rest, and above them the most at once in a step, of this rank, where that is the least."""
    return measured_range(rank, options, by_relay=by_relay)[0]


def real_step(options: Any, by_relay: bool = False) -> tuple[Loop, Callable[[], None]]:
    """The loop of a network with weights and moments, and a function that takes a whole step."""
    mesh = Mesh(options.parallel, "cpu") if options.parallel.world_size > 1 else None
    world = World(device=torch.device("cpu"), mesh=mesh).with_precision(options.precision)
    step = step_of(options, world, by_relay=by_relay)
    own, rows = -(-options.data.batch_size // options.parallel.num_replicas), rows_at_once(options)
    micro_batches = [step.micro_batches[0]] * -(-own // rows)
    return step_runner(dataclasses.replace(step, micro_batches=micro_batches), options, world)


def measured_range(_rank: int, options: Any, runs: int = 2, by_relay: bool = False) -> tuple[int, int]:
    """Bytes at rest, and above them the most at once in a step, of this rank: the least and the most over 3 x `runs`
    steps after the first. gloo's threads may hold what a block has gathered or reduced until they get a core again."""
    loop, run = real_step(options, by_relay=by_relay)
    held = [local_tensor(each.detach()) for each in loop.model.parameters()]
    held += [*loop.model.buffers(), *(each for _, each in loop.state.optimizer.tensors())]
    at_rest = sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held}.values())
    run()
    gc.collect()
    peaks = [profiled_peak(run) for _ in range(3 * runs)]
    if dist.is_initialized():
        dist.barrier()
    return at_rest + min(peaks), at_rest + max(peaks)


def profiled_peak(run: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    found = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = most = 0
    for event in sorted(found, key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
