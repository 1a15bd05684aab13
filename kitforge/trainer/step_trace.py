"""The memory of a task's own training step, traced without memory and without values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from kitforge.core.parallel.expert_load import LOAD, load_sums
from kitforge.core.parallel.fsdp import local_tensor
from kitforge.core.parallel.micro_batches import run_micro_batches
from kitforge.core.parallel.offload import HostOptimizer
from kitforge.core.parallel.plan.dry_run import StepMoments
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.world import World
from kitforge.foundation.types import MicroBatch
from kitforge.trainer.loop import Loop
from kitforge.trainer.optimizer_step import drop_gradients, optimizer_step
from kitforge.trainer.options import RunOptions
from kitforge.trainer.precision import autocast


@dataclass(frozen=True, slots=True, kw_only=True)
class DryStep:
    """A loop whose network has no values, and micro-batches of a step and an evaluation."""

    loop: Loop
    micro_batches: Sequence[MicroBatch]  # as many as a trace needs
    num_micro_batches: int = 1  # of the whole step
    eval_micro_batch: MicroBatch | None = None
    on_host: Sequence[Tensor] = ()  # of a device with memory of its own
    # What is held besides at other moments, and its cause.
    further: Mapping[str, tuple[str, Callable[[], Sequence[Tensor]]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedTask:
    """What a kit hands up to be planned: the step of a rank, whose network may have fewer blocks than the run's."""

    options: RunOptions
    num_blocks: int  # of the run's network
    kinds: Callable[[int], Sequence[object]]  # the kinds of the blocks of a network with so many
    step: Callable[[World, int], DryStep]  # in a world, with so many blocks


def step_runner(step: DryStep, options: RunOptions) -> Callable[[], None]:
    """A function that takes the step of a network that has values."""
    loop, state = step.loop, step.loop.state
    state.optimizer.init_state()
    loop.model.train()

    def run() -> None:
        precision = partial(autocast, loop.world.device, options.precision)
        sums = run_micro_batches(state.parallel, loop.task, step.micro_batches, 1e-3, precision)
        load = sums.pop(LOAD, None)
        sums |= {} if load is None else load_sums(load)
        optimizer_step(state, 1.0, 1e-4, 1e-9, sums=sums)

    return run


def trace_step(step: DryStep, options: RunOptions, trace: MemoryTrace) -> StepMemory:
    """The memory of this rank in a step and an evaluation, in a `dry_world` and under the trace, which has seen its
    loop being built.

    The passes, reductions, norm, clipping and update are those of the loop.
    """
    loop, task, state = step.loop, step.loop.task, step.loop.state
    parallel = state.parallel
    state.optimizer.init_state()
    loop.model.train()
    trace.begin("table rows" if parallel.tables else "frozen weights")
    held = [each for each in loop.model.parameters() if each.requires_grad]
    trace.attribute([*(local_tensor(each.detach()) for each in held), *loop.model.buffers()], "weights")
    trace.attribute((each for _, each in state.optimizer.tensors()), "moments")
    if isinstance(state.optimizer, HostOptimizer):
        has_gradients = options.trainer.offload == "optimizer_and_gradients"
        for cause, tensors in state.optimizer.host_tensors(gradients=has_gradients).items():
            trace.attribute(tensors, cause)
            trace.leave_on_host(tensors)
    trace.leave_on_host(step.on_host)
    trace.forget_peaks()
    for moment, (cause, held_besides) in step.further.items():
        trace.enter(moment)
        trace.attribute(held_besides(), cause)
    trace.enter("forward pass")
    moments = StepMoments(trace=trace, parallel=parallel)
    moments.watch_gradients(loop.model)
    moments.watch()
    moments.watch_passes()
    precision = partial(autocast, loop.world.device, options.precision)
    with trace.following_resizes():
        sums = run_micro_batches(parallel, task, step.micro_batches, 1e-3, moments.forward(precision))
        gradients = (each.grad for each in parallel.parameters().values())
        trace.attribute((each for each in gradients if each is not None), "gradients")
        trace.enter("update")
        load = sums.pop(LOAD, None)
        sums |= {} if load is None else load_sums(load)
        drop_gradients(state, task.frozen_parts(step.micro_batches))
        optimizer_step(state, 1.0, options.optimizer.learning_rate, options.trainer.max_grad_norm, sums=sums)
        if step.eval_micro_batch is not None:
            trace.enter("evaluation")
            if trace.work is not None:
                trace.work.enter(None)
            loop.model.eval()
            with torch.no_grad(), precision():
                task.loss(loop.model, step.eval_micro_batch)
            parallel.reshard()
    return trace.result()
