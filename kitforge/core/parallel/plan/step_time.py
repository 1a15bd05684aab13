"""The time of a step from its work: pure functions of work, speeds and degrees, without a trace."""

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.plan.work import FUNCTION, UPDATE, Message, StepWork, Work
from kitforge.core.parallel.schedules import Pass, simulated
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError

# A pair of a size and the part of the best speed that is reached there.
Fractions = tuple[tuple[float, float], ...]
# What a view costs the host, of a launch.
VIEW = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What a device and its links reach: peaks and bandwidths of data sheets, fractions and times as measured."""

    peak_tflops: dict[str, float]  # of dense products, by precision
    memory_gb_per_s: float
    launch_us: float  # host time of an operation in a training step
    # Whether launches and messages run beside the device; a CPU runs all of them itself.
    is_asynchronous: bool = True
    devices_per_node: int = 8
    link_gb_per_s: float = 10.0  # within a node: of a device, in one direction
    link_latency_us: float = 20.0
    # Measured ones over these, by kind of message: latency and bandwidth. gloo scatters as much as it reduces, for one.
    link_by_kind: dict[str, tuple[float, float]] | None = None
    network_gb_per_s: float = 10.0  # between nodes: of a device, in one direction
    network_latency_us: float = 20.0
    product_fraction: dict[str, Fractions] | None = None  # by kind (bf16, attention bf16): GFLOP, part of the peak
    functions_g_per_s: float | None = None  # elements of functions such as GELU; None: as fast as the memory
    memory_fraction: Fractions = ((1.0, 0.8),)  # MB of an operation, part of the bandwidth

    def __post_init__(self) -> None:
        positive = ("memory_gb_per_s", "launch_us", "devices_per_node", "link_gb_per_s", "network_gb_per_s")
        figures = {name: getattr(self, name) for name in positive} | {"functions_g_per_s": self.functions_g_per_s}
        figures |= {f"peak_tflops.{name}": peak for name, peak in self.peak_tflops.items()}
        for name, value in figures.items():
            check(value is None or value > 0, f"cluster.speed.{name}", value, "a number above 0")

    def seconds(self, kind: str, flops: int, size: int) -> float:
        """Of an operation, behind its launch."""
        moved = size / (self.memory_gb_per_s * 1e9 * _fraction(self.memory_fraction, size / 1e6))
        if kind in ("", FUNCTION):
            computed = 0.0 if self.functions_g_per_s is None else flops / self.functions_g_per_s / 1e9
            return max(moved, computed)
        precision = kind.split()[-1]
        peak = self.peak_tflops.get(precision)
        if peak is None:
            known = ", ".join(self.peak_tflops)
            raise ConfigError("the cluster has no peak of a precision", got=precision, expected=known)
        measured = self.product_fraction or {}
        reached = _fraction(measured.get(kind) or measured.get(precision) or ((1.0, 0.7),), flops / 1e9)
        # A fraction was measured with the bytes that a product moves.
        return max(flops / (peak * 1e12 * reached), moved if self.is_asynchronous else 0.0)

    def message_seconds(self, message: Message, count: float, size: float, degrees: ParallelConfig) -> float:
        """Of so many messages with so many bytes together: ring algorithms."""
        is_near = _span(message.axis, degrees) <= self.devices_per_node
        bandwidth = self.link_gb_per_s if is_near else self.network_gb_per_s
        latency = self.link_latency_us if is_near else self.network_latency_us
        if is_near and self.link_by_kind is not None:
            latency, bandwidth = self.link_by_kind.get(message.kind, (latency, bandwidth))
        turns, part = message_turns(message.kind, message.ranks)
        return count * turns * latency * 1e-6 + size * part / (bandwidth * 1e9)


def message_turns(kind: str, ranks: int) -> tuple[int, float]:
    """The turns of a ring of ranks, and the part of the bytes of a message that each rank sends in them."""
    if kind in ("send", "broadcast"):
        return 1 if kind == "send" else ranks - 1, 1.0
    turns = (ranks - 1) * (2 if kind == "all_reduce" else 1)
    return turns, turns / ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The seconds of a step by cause, and the FLOPs of a device in it without those of recomputation."""

    by_cause: Mapping[str, float]
    flops: float
    # By rank of the pipeline its passes, and the update after them, with their begin and end.
    passes: Sequence[Sequence[tuple[Pass, float, float]]] = ()

    @property
    def seconds(self) -> float:
        """Of the step."""
        return sum(self.by_cause.values())


def step_time(
    work: StepWork, speed: Speed, degrees: ParallelConfig, num_micro_batches: int, layers: Sequence[int] = ()
) -> StepTime:
    """The time of a step of so many micro-batches. `work` is that of some micro-batches through some stages, of which
    the first and the last of each; `layers` are the numbers of those of all stages."""
    passes = _Passes(work, speed, degrees, num_micro_batches, layers)
    pipeline, causes = degrees.stages, defaultdict[str, float](float)
    ranks = [pipeline.passes(rank, num_micro_batches) for rank in range(pipeline.num_ranks)]
    busy, ends = simulated(pipeline, num_micro_batches, passes.seconds)
    end = max(ends.values())
    fullest = max(range(len(ranks)), key=lambda rank: busy[rank])
    for each in ranks[fullest]:
        _add(causes, passes.causes(each))
    if pipeline.num_ranks > 1:
        ends = simulated(pipeline, num_micro_batches, passes.seconds, passes.send)[1]
        causes |= {"bubble": end - busy[fullest], "communication over pipeline": max(ends.values()) - end}
    update = pass_seconds(work[UPDATE], speed, degrees)
    sent = {name: seconds for name, seconds in update.items() if name.startswith("communication")}
    _add(causes, sent)
    causes["update"] = sum(update.values()) - sum(sent.values())
    flops = sum(passes.work(each).flops - passes.work(each).counts["recomputed"] for rank in ranks for each in rank)
    last = max(ends.values())
    drawn = [[(each, ends[each] - passes.seconds(each), ends[each]) for each in rank] for rank in ranks]
    drawn = [[*rank, (UPDATE, last, last + sum(update.values()))] for rank in drawn]
    return StepTime(by_cause=dict(causes), flops=flops / len(ranks), passes=drawn)


def pass_seconds(work: Work, speed: Speed, degrees: ParallelConfig, times: float = 1.0) -> dict[str, float]:
    """The seconds of a pass by cause, each `times` as long."""
    products = memory = 0.0
    for each, count in work.operations.items():
        seconds = count * speed.seconds(*each)
        products, memory = products + seconds * each.is_product, memory + seconds * (not each.is_product)
    launches = (work.counts["launches"] + VIEW * work.counts["views"]) * speed.launch_us * 1e-6
    if speed.is_asynchronous:
        launches = max(0.0, launches - products - memory)
    causes = defaultdict(float, {"products": products, "memory-bound operations": memory, "launches": launches})
    hidden, last = defaultdict[str, float](float), dict[str, float]()
    for message, count in work.messages.items():
        if message.kind == "send":
            continue
        seconds = speed.message_seconds(message, count, work.sent[message], degrees)
        name = f"communication over {message.axis}"
        if speed.is_asynchronous and (message.is_hidden or degrees.copies > 1):
            hidden[name] += seconds
            last[name] = max(last.get(name, 0.0), seconds / count)
        else:
            causes[name] += seconds
    # What is hidden begins or ends the pass with one message that has nothing beside it.
    room = products + memory
    for name, seconds in hidden.items():
        exposed = max(seconds - room, last[name])
        room -= seconds - exposed
        causes[name] += exposed
    return {name: times * seconds for name, seconds in causes.items() if seconds}


class _Passes:
    """The work of each pass of a step by that of those which were traced."""

    def __init__(
        self, work: StepWork, speed: Speed, degrees: ParallelConfig, count: int, layers: Sequence[int]
    ) -> None:
        self._work, self._speed, self._degrees, self._layers = work, speed, degrees, layers
        self._stages = sorted({each.stage for each in work if each != UPDATE})
        self._num_traced = 1 + max(each.micro_batch for each in work)
        self._count, self._found = count, dict[Pass, dict[str, float]]()
        sends = [(each, size) for part in work.values() for each, size in part.sent.items() if each.kind == "send"]
        counts = sum(part.messages[each] for part in work.values() for each in part.messages if each.kind == "send")
        mean = sum(size for _, size in sends) / max(counts, 1)
        self.send = speed.message_seconds(sends[0][0], 1, mean, degrees) if sends else 0.0

    def _like(self, each: Pass) -> Pass:
        """The pass that was traced and is like this one."""
        number = each.micro_batch
        if number >= self._num_traced - 1:
            number = self._num_traced - 1 if number == self._count - 1 else min(1, self._num_traced - 1)
        own = [stage for stage in self._stages if 0 < stage < len(self._layers) - 1]
        near = each.stage if each.stage in self._stages else min(own, key=lambda at: abs(at - each.stage))
        return Pass(each.kind, near, number)

    def work(self, each: Pass) -> Work:
        """Of a pass."""
        return self._work.get(self._like(each), Work())

    def seconds(self, each: Pass) -> float:
        """Of a pass."""
        return sum(self.causes(each).values())

    def causes(self, each: Pass) -> dict[str, float]:
        """Its seconds."""
        like = self._like(each)
        key = Pass(each.kind, each.stage, like.micro_batch)
        if key not in self._found:
            is_traced = each.stage == like.stage
            times = 1.0 if is_traced else self._layers[each.stage] / self._layers[like.stage]
            self._found[key] = pass_seconds(self.work(each), self._speed, self._degrees, times)
        return self._found[key]


def _add(causes: dict[str, float], further: Mapping[str, float]) -> None:
    for name, seconds in further.items():
        causes[name] = causes.get(name, 0.0) + seconds


def _span(axis: str, degrees: ParallelConfig) -> int:
    """The ranks that a group along an axis of any view spans; all of them where it is along several."""
    if axis == "expert":
        return degrees.expert * degrees.tensor
    outer = {"fsdp": "shard", "batch": "data", "replicas": "data", "expert_data": "data"}.get(axis, axis)
    return math.prod(getattr(degrees, each) for each in AXES[AXES.index(outer) if outer in AXES else 0 :])


def _fraction(fractions: Fractions, size: float) -> float:
    """By the logarithm of the size, between the sizes that were measured; that of the nearest beyond them."""
    at = bisect([each for each, _ in fractions], size)
    if at in (0, len(fractions)):
        return fractions[min(at, len(fractions) - 1)][1]
    (low, one), (high, two) = fractions[at - 1 : at + 1]
    return one + (two - one) * math.log(size / low) / math.log(high / low)
