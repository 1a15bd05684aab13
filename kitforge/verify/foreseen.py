"""The contract of plans: the bytes that are foreseen of a step are those that torch's profiler counts in a real one."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from kitforge.core.parallel.fsdp import local_tensor
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.host_values import is_fake
from kitforge.trainer.step_trace import DryStep, step_runner, trace_step
from kitforge.verify.case import Case
from kitforge.verify.contract import Contract, Measured, NotOfferedError

BOUND = 0.05
# Moments of a plan that are not in the step.
OTHER_MOMENTS = ("rollout", "growth of a table", "evaluation")


def check_foreseen(case: Case) -> Measured:
    """The peak of a step that a plan traces, against the profiler's of the same step on this CPU."""
    options = case.options({"device": "cpu"})
    try:
        planned = case.kit.plan(options)
    except ConfigError as error:
        raise NotOfferedError(str(error).splitlines()[0]) from None
    trace = MemoryTrace("cpu", is_building=True)
    with dry_world(options.parallel, options.precision) as world, trace:
        foreseen = step_peak(trace_step(planned.step(world, planned.num_blocks), options, trace))
    world = World(device=torch.device("cpu"), precision=options.precision)
    measured, _ = measured_range(lambda: planned.step(world, planned.num_blocks), options)
    figures = f"{foreseen / 2**20:.2f} MiB foreseen, {measured / 2**20:.2f} measured"
    # Below a MiB scalars and buffers of loops are most of it.
    figure = abs(foreseen - measured) / max(measured, 2**20)
    return Measured(figure=figure, bound=BOUND, unit=f"relative: {figures}")


def step_peak(memory: StepMemory) -> int:
    """The peak of the step without what is before it and the evaluation after it."""
    return max(sum(sizes.values()) for name, sizes in memory.moments.items() if name not in OTHER_MOMENTS)


def measured_range(step_of: Callable[[], DryStep], options: Any, runs: int = 2) -> tuple[int, int]:
    """Bytes at rest, and above them the most at once in a step, of this rank: the least and the most over 3 x `runs`
    steps after the first. gloo's threads may hold what a block has gathered or reduced until they get a core again."""
    gc.collect()
    before = _held_storages(set())
    step = step_of()
    run = step_runner(step, options)
    run()
    step.loop.state.parallel.wait()
    gc.collect()
    data = {id(each) for batch in (*step.micro_batches, step.eval_micro_batch or {}) for each in batch.values()}
    at_rest = sum(size for key, size in _held_storages(data).items() if key not in before)
    peaks = [profiled_peak(run) for _ in range(3 * runs)]
    return at_rest + min(peaks), at_rest + max(peaks)


def _held_storages(data: set[int]) -> dict[int, int]:
    """Bytes by address of all tensors that Python holds, but of data: whole numbers, and figures of rows in float64."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and id(each) not in data)
    of_data = (torch.int64, torch.int32, torch.bool, torch.float64)
    held = (local_tensor(each.detach()) for each in tensors if not is_fake(each) and each.dtype not in of_data)
    # Of a trace that is still held a shard may be fake.
    found = (each.untyped_storage() for each in held if each.device.type == "cpu" and not is_fake(each))
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


def profiled_peak(run: Callable[[], None]) -> int:
    """The most bytes at once that the CPU's allocator gave `run`."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events: Any = profile.profiler.kineto_results.events()
    now = most = 0
    for event in sorted((each for each in events if each.name() == "[memory]"), key=lambda each: each.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


CONTRACTS = (Contract(name="foreseen", promise="a plan foresees the memory of a step", check=check_foreseen),)
