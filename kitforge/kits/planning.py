"""The memory that a run will need: traced from its own step, before a device or a row of data is there."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from kitforge.core.kernels.dispatch import watching_kernels
from kitforge.core.parallel.plan.depth import extrapolate, trace_depths
from kitforge.core.parallel.plan.dry_run import dry_world
from kitforge.core.parallel.plan.memory import MemoryTrace, StepMemory
from kitforge.core.parallel.plan.stages import traced_ranks
from kitforge.core.parallel.plan.step_time import Speed, StepTime, step_time
from kitforge.core.parallel.plan.work import UPDATE, StepWork, Work, WorkTrace, continued
from kitforge.core.parallel.schedules import Pass
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError
from kitforge.kits.dry_task import rows_at_once
from kitforge.kits.kit import AnyKit
from kitforge.trainer.step_trace import TracedTask, trace_step

GIB = 2**30
# Steps of a run that names none; its schedule needs a number.
STEPS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The devices of a run, one for each rank."""

    name: str = "CPU"
    kind: str = "cpu"  # the device type
    memory_gb: float = 16.0  # of a device, in units of 2**30 bytes, as the names of devices count
    # Part of the memory that is not for tensors: the device's context, buffers of communication, pieces too small.
    reserve: float = 0.06
    devices: int | None = None  # None: as many as the degrees of parallelism multiply to
    speed: Speed | None = None  # None: a plan has no times
    price_per_hour: float | None = None  # of a device
    currency: str | None = None  # of the price: EUR
    expert_skew: float = 1.0  # with parallel.expert, the rows of the fullest rank by the mean of the ranks

    def __post_init__(self) -> None:
        check(self.memory_gb > 0, "cluster.memory_gb", self.memory_gb, "a number above 0")
        check(0 <= self.reserve < 1, "cluster.reserve", self.reserve, "from 0 to below 1")
        check(self.devices is None or self.devices > 0, "cluster.devices", self.devices, "a whole number of at least 1")
        check(self.expert_skew >= 1, "cluster.expert_skew", self.expert_skew, "at least 1: the fullest by the mean")
        has_both, price = (self.price_per_hour is None) == (self.currency is None), self.price_per_hour
        check(has_both, "cluster.currency", self.currency, "one with a price, none without", "cluster.currency=EUR")
        check(price is None or price > 0, "cluster.price_per_hour", price, "a number above 0")

    @property
    def usable(self) -> int:
        """Bytes of a device that are for tensors."""
        return int(self.memory_gb * GIB * (1 - self.reserve))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory of a rank under some options, the options that were changed to get there, and what is not exact."""

    options: Any
    by_index: Mapping[int, StepMemory]  # of the ranks that were traced, by their index along `pipeline`
    work: StepWork  # of all of them
    layers: Sequence[int]  # of the stages
    num_micro_batches: int
    changes: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def time(self, cluster: ClusterConfig) -> StepTime | None:
        """The time of a step; None for a device without figures of its speed in a precision that is multiplied."""
        kinds = {each.kind.split()[-1] for part in self.work.values() for each in part.operations if each.is_product}
        if cluster.speed is None or kinds - cluster.speed.peak_tflops.keys():
            return None
        return step_time(self.work, cluster.speed, self.options.parallel, self.num_micro_batches, self.layers)

    @property
    def fullest(self) -> int:
        """The index along `pipeline` of the ranks that need the most."""
        return max(self.by_index, key=lambda index: self.by_index[index].peak)

    @property
    def memory(self) -> StepMemory:
        """That of those ranks."""
        return self.by_index[self.fullest]


def planned_task(kit: AnyKit, options: Any, cluster: ClusterConfig) -> tuple[TracedTask, Any]:
    """What is traced of these options, and the options of its world. Raises ConfigError for a network that the degrees
    cannot split."""
    # The memory of this host is not that of the run's.
    kit.check_parallel(replace(options, trainer=replace(options.trainer, offload="none")))
    trainer = replace(options.trainer, max_steps=options.trainer.max_steps or STEPS, epochs=None)
    # Graphs of the compiler are not traced.
    level = "O1" if options.compile_level == "O2" else options.compile_level
    whole = options if options.parallel.copies == 1 else replace(options, parallel=replace(options.parallel, copies=1))
    return kit.plan(replace(whole, trainer=trainer, device=cluster.kind, compile_level=level)), whole


def plan_memory(
    kit: AnyKit, options: Any, cluster: ClusterConfig, changes: tuple[str, ...] = (), *, keeps_course: bool = False
) -> MemoryPlan:
    """Trace the step of these options; with `keeps_course` through all blocks, and memory over the step. Raises
    ConfigError for a network that the degrees cannot split, and for a run whose step would be traced wrongly."""
    traced, whole = planned_task(kit, options, cluster)
    by_index, work, layers, num_micro_batches = _traces(traced, whole, cluster, keeps_course)
    has_experts = any(getattr(block, "num_experts", 0) for block in traced.kinds(traced.num_blocks))
    return MemoryPlan(
        options=options,
        by_index=by_index,
        work=work,
        layers=layers,
        num_micro_batches=num_micro_batches,
        changes=changes,
        doubts=tuple(_doubts(options, cluster, has_experts)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """The traced step of a rank: its memory and work, the layers of all stages, and its micro-batches."""

    memory: StepMemory
    work: StepWork
    layers: Sequence[int]
    num_traced: int  # micro-batches
    num_micro_batches: int  # of the whole step


def trace_rank(
    traced: TracedTask, options: Any, cluster: ClusterConfig, depth: int, index: int = 0, *, keeps_course: bool = False
) -> TracedRank:
    """Trace the first rank with an index along `pipeline`, of a network with so many blocks."""
    with dry_world(options.parallel, options.precision, index, cluster.kind, cluster.expert_skew) as world:
        work = WorkTrace(cluster.kind, options.precision, world.mesh)
        memory = MemoryTrace(cluster.kind, work, is_building=True, keeps_course=keeps_course)
        with watching_kernels(work.counted), memory:
            step = traced.step(world, depth)
            stacks = step.loop.state.parallel.stage_layers.values()
            return TracedRank(
                layers=[sum(len(own.layers) for own in each) for each in zip(*stacks, strict=True)],
                num_traced=len(step.micro_batches),
                num_micro_batches=step.num_micro_batches,
                memory=trace_step(step, traced.options, memory),
                work=work.passes,
            )


def _traces(
    traced: TracedTask, options: Any, cluster: ClusterConfig, keeps_course: bool
) -> tuple[dict[int, StepMemory], StepWork, Sequence[int], int]:
    """The memory and the work of rank 0; of a pipeline those of a rank of each kind, the memory by its index there; the
    layers of the stages, and the micro-batches of a step."""
    trace = partial(trace_rank, traced, options, cluster, keeps_course=keeps_course)
    if options.parallel.pipeline > 1:
        # Whole: three shallow traces, which have three blocks of a stage at least, would be of more blocks than most.
        first = trace(traced.num_blocks)
        others = traced_ranks(options.parallel.stages, first.num_traced, first.layers)[1:]
        found = {0: first} | {index: trace(traced.num_blocks, index) for index in others}
        # The longest update of a rank is that of all.
        merged: dict[Pass, Work] = {}
        for each in sorted(found.values(), key=lambda each: each.work[UPDATE].counts["launches"]):
            merged |= each.work
        memories = {index: each.memory for index, each in found.items()}
        return memories, merged, first.layers, first.num_micro_batches
    depths = (traced.num_blocks,) if keeps_course else trace_depths(traced.kinds, traced.num_blocks)
    shallow = [trace(depth) for depth in depths]
    last = shallow[-1]
    if len(shallow) == 1:
        return {0: last.memory}, last.work, last.layers, last.num_micro_batches
    memories = {depth: each.memory for depth, each in zip(depths, shallow, strict=True)}
    memory = extrapolate(memories, traced.num_blocks)
    further = (traced.num_blocks - depths[-1]) // (depths[1] - depths[0])
    work = continued(shallow[0].work, shallow[1].work, shallow[2].work, further)
    if memory is None or work is None:
        last = trace(traced.num_blocks)
        memory, work = last.memory, last.work
    return {0: memory}, work, last.layers, last.num_micro_batches


def _doubts(options: Any, cluster: ClusterConfig, has_experts: bool) -> Iterator[str]:
    """Where real steps were found to take more memory than is foreseen, or were not looked at."""
    if cluster.kind != "cpu":
        yield f"traced by the operations of a CPU: no step on a {cluster.name} has been compared yet"
    elif options.parallel.world_size > 1:
        yield "threads of gloo hold a buffer longer in some steps: up to 16 % more was seen"
    if cluster.kind == "cpu" and options.precision != "fp32":
        yield f"with AMX, products in {options.precision} copy their operands: up to 2 % more was seen"
    if has_experts and options.precision != "fp32":
        yield f"experts in {options.precision} cast their rows unseen: up to 3 % more was seen"
    if (most := options.parallel.expert) > 1:
        skew = (
            f"{min(cluster.expert_skew, most):g} times the mean: cluster.expert_skew, from 1 to parallel.expert={most}"
        )
        yield f"the rank whose experts get the most rows gets {skew}"
    if options.trainer.offload == "optimizer_and_gradients":
        yield "gradients that wait for the host stay on the device a while: up to 15 % more was seen"
    rollout = getattr(options, "rollout", None)
    if rollout is not None and rollout.engine.kv_cache_bytes is None and cluster.kind != "cpu":
        yield "rollout.engine.kv_cache_bytes=null: rollouts take half of the memory that is free when they begin"
    if options.compile_level == "O2":
        yield "compile_level=O2 is traced as O1"
    if options.parallel.copies > 1:
        yield "parallel.copies=2 is traced as 1: two slices hold what the whole micro-batch does"


def fill_cluster(options: Any, cluster: ClusterConfig) -> Any:
    """The options with `parallel.data` for the devices that the degrees leave over. Raises ConfigError where the
    degrees do not divide the devices."""
    size, devices = options.parallel.world_size, cluster.devices or options.parallel.world_size
    if devices % size:
        raise ConfigError(
            "the degrees of parallelism do not divide the devices",
            got=f"{options.parallel.describe()} of cluster.devices={devices}",
            fix=f"change parallel.* (for example parallel.shard={devices} alone), or cluster.devices={size}",
        )
    return replace(options, parallel=replace(options.parallel, data=options.parallel.data * (devices // size)))


def plans_that_save(kit: AnyKit, plan: MemoryPlan, cluster: ClusterConfig) -> Iterator[MemoryPlan]:
    """Plans with one more change each that saves memory, until one fits or nothing is left to change."""
    for name, value in _changes(plan.options):
        section, _, last = name.rpartition(".")
        changed = {last: value} if not section else {section: replace(getattr(plan.options, section), **{last: value})}
        if name == "parallel.shard":
            changed = {"parallel": replace(plan.options.parallel, shard=value, data=1)}
        try:
            options = replace(plan.options, **changed)
            found = plan_memory(kit, options, cluster, (*plan.changes, f"{name}={value}"))
        except ConfigError:
            continue
        # More micro-batches, for one, need a second copy of the gradients while these are added up.
        if found.memory.peak >= plan.memory.peak:
            continue
        plan = found
        yield plan
        if plan.memory.peak <= cluster.usable:
            return


def _changes(options: Any) -> Iterator[tuple[str, Any]]:
    """Changes by what they cost: none of speed first."""
    degrees, trainer = options.parallel, options.trainer
    if degrees.data > 1:
        yield "parallel.shard", degrees.data * degrees.shard
    if options.precision == "fp32":
        yield "precision", "bf16"
    rows = rows_at_once(options)
    if rows > 1:
        yield "trainer.micro_batch_size", max(rows // 4, 1)
    if not any(each.init for each in fields(trainer) if each.name == "activation_checkpointing"):
        return
    if trainer.activation_checkpointing == "none":
        yield "trainer.activation_checkpointing", "selective"
    if rows // 4 > 1:
        yield "trainer.micro_batch_size", 1
    if trainer.activation_checkpointing != "full":
        yield "trainer.activation_checkpointing", "full"
