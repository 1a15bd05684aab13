"""The memory of a task's own training step, traced without memory and without values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kitforge.core.parallel.expert_load import LOAD, load_sums
from kitforge.core.parallel.fsdp import local_tensor
from kitforge.core.parallel.micro_batches import run_micro_batches
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.plan.dry_run import StepMoments
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.plan.work import WorkTrace
from kitforge.core.parallel.world import World
from kitforge.foundation.types import MicroBatch
from kitforge.trainer.loop import Loop
from kitforge.trainer.optimizer_step import drop_gradients, optimizer_step
from kitforge.trainer.options import RunOptions
from kitforge.trainer.precision import autocast
from kitforge.trainer.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class DryStep:
    """A task, its network, which is sharded and on the meta device, and micro-batches of a step and an evaluation."""

    task: Task
    network: nn.Module  # what `task.build` gives
    micro_batches: Sequence[MicroBatch]
    eval_micro_batch: MicroBatch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    """What a kit hands up to be planned: the step of a rank, whose network may have fewer blocks than the run's."""

    options: RunOptions
    num_blocks: int  # of the run's network
    kinds: Callable[[int], Sequence[object]]  # the kinds of the blocks of a network with so many
    step: Callable[[World, int], DryStep]  # in a world, with so many blocks


def trace_step(
    step: DryStep, options: RunOptions, world: World, device_type: str, work: WorkTrace | None = None
) -> StepMemory:
    """The memory of rank 0 in a step and an evaluation, in a `dry_world`; `device_type` is that of the planned device.
    `work` counts what the step does.

    The passes, reductions, norm, clipping and update are those of the loop.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        parallel_model_of(step.network, world).materialize(world.device)

        def without_values(micro_batch: MicroBatch) -> MicroBatch:
            # But the numbers of samples, which the host reads.
            has_values = {name for name, each in micro_batch.items() if name == "samples" or not torch.is_tensor(each)}
            return {name: each if name in has_values else mode.from_tensor(each) for name, each in micro_batch.items()}

        evaluation = None if step.eval_micro_batch is None else without_values(step.eval_micro_batch)
        batches = [without_values(each) for each in step.micro_batches]
        step = replace(step, micro_batches=batches, eval_micro_batch=evaluation)
        return _traced(step, Loop(step.task, options, world), options, MemoryTrace(device_type, work))


def step_runner(step: DryStep, options: RunOptions, world: World) -> tuple[Loop, Callable[[], None]]:
    """The loop of a network with random weights on the device of a world, and a function that takes a step of it."""
    parallel_model_of(step.network, world).materialize(world.device)
    loop = Loop(step.task, options, world)
    state, precision = loop.state, partial(autocast, world.device, options.precision)
    with torch.no_grad():
        for shard in state.parallel.parameters().values():
            shard.normal_(0, 0.02)
    state.optimizer.init_state()
    loop.model.train()

    def run() -> None:
        sums = run_micro_batches(state.parallel, step.task, step.micro_batches, 1e-3, precision)
        load = sums.pop(LOAD, None)
        sums |= {} if load is None else load_sums(load)
        optimizer_step(state, 1.0, 1e-4, 1e-9, sums=sums)

    return loop, run


def _traced(step: DryStep, loop: Loop, options: RunOptions, trace: MemoryTrace) -> StepMemory:
    state, parallel = loop.state, loop.state.parallel
    state.optimizer.init_state()
    loop.model.train()
    trace.attribute(
        [*(local_tensor(each.detach()) for each in loop.model.parameters()), *loop.model.buffers()], "weights"
    )
    trace.attribute((each for _, each in state.optimizer.tensors()), "moments")
    moments = StepMoments(trace=trace, parallel=parallel)
    moments.watch_gradients(loop.model)
    moments.watch()
    moments.watch_passes()
    precision = partial(autocast, loop.world.device, options.precision)
    with trace, trace.following_resizes():
        sums = run_micro_batches(parallel, step.task, step.micro_batches, 1e-3, moments.forward(precision))
        gradients = (each.grad for each in parallel.parameters().values())
        trace.attribute((each for each in gradients if each is not None), "gradients")
        trace.enter("update")
        load = sums.pop(LOAD, None)
        sums |= {} if load is None else load_sums(load)
        drop_gradients(state, step.task.frozen_parts(step.micro_batches))
        optimizer_step(state, 1.0, options.optimizer.learning_rate, options.trainer.max_grad_norm, sums=sums)
        if step.eval_micro_batch is not None:
            trace.enter("evaluation")
            if trace.work is not None:
                trace.work.enter(None)
            loop.model.eval()
            with torch.no_grad(), precision():
                step.task.loss(loop.model, step.eval_micro_batch)
            parallel.reshard()
    return trace.result()
