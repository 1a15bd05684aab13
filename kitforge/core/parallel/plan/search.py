"""All layouts of a step as columns of numbers, with the memory and the time of each estimated from few traces.

A probe is a traced step as quantities: bytes by moment and cause, seconds, messages; each beside the blocks and for a
block. Probes with one axis split say which part of a quantity this axis divides, and what it brings.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kitforge.core.parallel.config import AXES
from kitforge.core.parallel.plan.memory import StepMemory
from kitforge.core.parallel.plan.stages import most_in_flight
from kitforge.core.parallel.plan.step_time import VIEW, Speed, message_turns
from kitforge.core.parallel.plan.work import UPDATE, StepWork
from kitforge.core.parallel.schedules import Pipeline, ScheduleName, idle_fraction

SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "interleaved", "zero_bubble", "zero_bubble_v")
RECOMPUTE = ("none", "selective", "full")
# Causes of bytes that FSDP divides.
STATE = ("weights", "frozen weights", "gradients", "moments", "table rows")

Columns = dict[str, Any]  # arrays of int32, one value for each layout
Probe = Mapping[tuple[Any, ...], Any]  # quantities by name: an array [beside the blocks, for a block]


def legal_layouts(
    num_ranks: int, allowed: Mapping[str, Iterable[int]], batch: int, least_rows: int, layers: int
) -> Columns:
    """The layouts of so many ranks: degrees, `zero`, `schedule` and `recompute` by index, each of its values in
    `allowed`, and `count` micro-batches of `rows` rows, at least `least_rows` unless `rows` is in `allowed`."""
    found: Columns = {}
    for axis in ("tensor", "context", "pipeline", "shard", "data"):
        _cross(found, axis, allowed[axis])
        _keep(found, num_ranks % _product(found, tuple(found)) == 0)
    _keep(found, _product(found, AXES) == num_ranks)
    own = batch // _product(found, ("data", "shard"))
    _keep(found, own * _product(found, ("data", "shard")) == batch)
    for name in ("zero", "schedule", "expert"):
        _cross(found, name, allowed[name])
    zero, schedule, is_sharded = found["zero"], found["schedule"], found["shard"] > 1
    is_legal = (is_sharded | (zero == max(allowed["zero"]))) & ((schedule < 2) | ~is_sharded | (zero < 3))
    has_stages = found["pipeline"] * (1 + schedule % 2) <= layers
    is_legal &= np.where(found["pipeline"] > 1, has_stages, schedule == 0)
    _keep(found, is_legal & (_product(found, ("data", "shard", "context")) % found["expert"] == 0))
    _cross(found, "count", [1] if "rows" in allowed else [2**each for each in range(batch.bit_length())])
    own = batch // _product(found, ("data", "shard"))
    if "rows" in allowed:
        found["count"] = -(-own // np.minimum(own, max(allowed["rows"])))
    found["rows"] = -(-own // found["count"])
    is_even = (found["rows"] * found["count"] == own) & ((found["rows"] >= least_rows) | (found["count"] == 1))
    _keep(found, is_even | ("rows" in allowed))
    _cross(found, "recompute", allowed["recompute"])
    return found


def _cross(columns: Columns, name: str, values: Iterable[int]) -> None:
    """Each layout with each of the values."""
    given = np.array(sorted(values), dtype=np.int32)
    size = len(next(iter(columns.values()))) if columns else 1
    columns |= {each: np.repeat(column, len(given)) for each, column in columns.items()}
    columns[name] = np.tile(given, size)


def _keep(columns: Columns, chosen: Any) -> None:
    columns |= {each: column[chosen] for each, column in columns.items()}


def _product(columns: Columns, names: Iterable[str]) -> Any:
    return functools.reduce(np.multiply, [columns[name] for name in names], np.int64(1))


def quantities(memory: StepMemory, work: StepWork, speed: Speed) -> dict[tuple[Any, ...], float]:
    """The quantities of a traced step: bytes at the peak of each moment; seconds, and messages with their bytes, of the
    first micro-batch (`each`), the last and the update. `longest` is the longest message of each pass."""
    found = defaultdict[tuple[Any, ...], float](float)
    last = max(at.micro_batch for at in work)
    for at, part in work.items():
        is_pass = at != UPDATE
        groups = ["each"] * (at.micro_batch == 0) + ["last"] * (at.micro_batch == last) if is_pass else ["update"]
        for group in groups:
            for operation, count in part.operations.items():
                name = "products" if operation.is_product else "memory-bound operations"
                found[group, name] += count * speed.seconds(*operation)
            found[group, "launches"] += (part.counts["launches"] + VIEW * part.counts["views"]) * speed.launch_us * 1e-6
            longest = defaultdict[tuple[Any, ...], float](float)
            for message, count in part.messages.items():
                # FSDP's group is shard x context, and that of buckets data x context, whichever of them is split.
                axis = {"fsdp": "shard", "data": "batch"}.get(message.axis, message.axis)
                key = message.kind, axis, message.is_hidden
                found[group, *key, "count"] += count
                found[group, *key, "bytes"] += part.sent[message]
                longest[key] = max(longest[key], part.sent[message] / count)
            for key, size in longest.items():
                found[group, *key, "longest"] += size
    sizes = {("memory", moment, cause): size for moment, each in memory.moments.items() for cause, size in each.items()}
    return found | sizes


class _Term(NamedTuple):
    """A quantity, by stage of ZeRO (0 without shards), recomputation and whether there is a single micro-batch, beside
    the blocks and for a block; the parts of it that FSDP and each axis divide, its growth with each further row, and
    the axis that brings it."""

    values: Any  # [4, 3, 2, 2]
    sharded: Any  # [4, 2]
    divided: dict[str, Any]  # [4, 2] each
    growth: Any = 0.0  # [2]
    axis: str | None = None


class Estimate:
    """The memory and the time of layouts, from probes: `by_mode` of recomputation, `by_stage` of ZeRO with so many
    `shards` (0 is one rank) the probe of several micro-batches and of a single one, and `by_axis` (and `rows`), with
    shards and without, the probe it is compared with, itself and their ratio."""

    def __init__(
        self,
        by_mode: Sequence[Probe],
        by_stage: Sequence[tuple[Probe, Probe]],
        by_axis: Mapping[str, Sequence[tuple[Probe, Probe, int]]],
        speed: Speed,
        sizes: tuple[int, int, int],
    ) -> None:
        """`sizes`: the shards, the rows of a micro-batch, and the blocks of the network."""
        self._by_mode, self._by_stage, self._by_axis, self._speed = by_mode, by_stage, by_axis, speed
        self._shards, self._rows, self._layers = sizes
        self._whole = np.array([1, self._layers])
        launches = np.array([self._sum(each, [("each", "launches")]) @ self._whole for each in by_mode])
        self._again = np.where(launches[0] > 0, launches / max(launches[0], 1e-30), 1.0)
        every = [*by_mode, *itertools.chain(*by_stage)]
        every += [probe for pairs in by_axis.values() for _, probe, _ in pairs]
        self._terms = {key: self._brought(key) for key in {key: None for probe in every for key in probe}}

    def _sum(self, probe: Probe, keys: Sequence[tuple[Any, ...]]) -> Any:
        return np.sum([probe.get(key, np.zeros(2)) for key in keys], axis=0)

    def _of_pairs(self, axis: str, keys: Sequence[tuple[Any, ...]]) -> Any:
        """The sum of quantities without an axis and with it, by stage."""
        pairs = [self._by_axis[axis][-1][:2], *[self._by_axis[axis][0][:2]] * 3]
        return np.array([[self._sum(each, keys) for each in probes] for probes in zip(*pairs, strict=True)])

    def _like(self, keys: Sequence[tuple[Any, ...]]) -> _Term:
        """How the sum of quantities depends on the layout."""
        by_stage = np.array([[self._sum(each, keys) for each in pair] for pair in self._by_stage])
        by_mode = np.array([self._sum(each, keys) for each in self._by_mode])
        values = by_stage[:, None] + (by_mode - by_mode[0])[None, :, None]
        # What FSDP shards it divides; of the rest there may be another amount, the same with any number of shards.
        is_state = keys[0][0] == "update" or keys[0][-1] in STATE
        sharded = _divided_part(by_stage[:, 0], by_stage[0, 0], self._shards) * is_state
        divided, growth = dict[str, Any](), np.zeros(2)
        for axis in self._by_axis:
            one, two = self._of_pairs(axis, keys)
            if axis == "rows":
                # No quantity grows by more than the rows do.
                growth = np.clip(two[1] / np.maximum(one[1], 1e-30) - 1, 0.0, 1.0) * (one[1] > 0) / self._rows
            else:
                if not is_state:
                    # The peak of a moment lies elsewhere in a deeper network: its sum alone is that of a trace.
                    one, two = (each @ self._whole[:, None] * np.ones(2) for each in (one, two))
                divided[axis] = _divided_part(two, one, self._by_axis[axis][0][2])
                if axis == "context" and is_state and self._shards > 1:
                    divided[axis][1:] = 0.0  # as part of FSDP's group
        if keys[0][0] == "memory" and keys[0][2] in ("gathered weights", "communication"):
            # In the probes they are those of weights that FSDP gathers, but for what an axis brings.
            divided |= self._cause("weights").divided
        return _Term(np.maximum(values, 0.0), sharded, divided, growth)

    @functools.cache  # noqa: B019 (an estimate lives as long as its search)
    def _cause(self, cause: str) -> _Term:
        return self._like([key for key in self._by_mode[0] if key[0] == "memory" and key[2] == cause])

    def _brought(self, key: tuple[Any, ...]) -> list[_Term]:
        """What there is of a quantity in the base, and what each axis brings, which depends on the others as bytes of
        a cause do."""
        own, is_count = self._like([key]), key[-1] == "count"
        terms = [own._replace(divided={}, growth=0.0) if is_count else own]
        for axis in self._by_axis:
            if axis == "rows":
                continue
            degree = self._by_axis[axis][0][2]
            kept = 1 - own.divided[axis] * (1 - 1 / degree)
            one, two = self._of_pairs(axis, [key])
            more = np.maximum(two - one * kept, 0.0)
            most = np.maximum((two - one * kept) @ self._whole, 0.0)
            more *= (most / np.maximum(more @ self._whole, 1e-30))[:, None]
            if not more.any():
                continue
            like = self._cause("gradients" if axis == "data" else "activations")
            # What is gathered or reduced is whole on each rank of its axis; what is exchanged is its own part.
            is_exchanged = axis == "context" and key[1] == "all_to_all" and not is_count
            divided = {**({} if is_count else like.divided), axis: np.zeros((4, 2))}
            if is_exchanged:
                divided[axis], more = np.ones((4, 2)), more * degree
            sharded = like.sharded if axis == "data" and not is_count else np.zeros((4, 2))
            # What it brings to a pass it brings to one that is computed again.
            again = self._again if axis != "data" and key[0] in ("each", "last") else np.ones(3)
            values = more[:, None, None] * again[None, :, None, None] * np.ones((1, 1, 2, 1))
            terms.append(_Term(values, sharded, divided, 0.0 if is_count else like.growth, axis))
        return terms

    def of(self, columns: Columns) -> tuple[Any, dict[str, Any]]:
        """The bytes of the fullest rank of each layout, and its seconds by cause."""
        axes = ("data", "tensor", "context", "expert")
        cut = {axis: (1 - 1 / columns[axis]).astype(np.float32)[:, None] for axis in axes}
        more_rows = (columns["rows"] - self._rows).astype(np.float32)[:, None]
        stage = np.where(columns["shard"] > 1, columns["zero"], 0)
        is_single = (columns["count"] == 1).astype(np.int8)
        is_split = {axis: columns[axis] > 1 for axis in axes}
        is_split["data"] = is_split["data"] | (is_split["context"] & (stage == 0))
        of_shards = (1 - 1 / _product(columns, ("shard", "context"))).astype(np.float32)[:, None]
        blocks = (self._layers / columns["pipeline"]).astype(np.float32)

        def value(key: tuple[Any, ...], blocks: Any = blocks) -> Any:
            total = np.zeros(len(stage), np.float32)
            for term in self._terms.get(key, ()):
                found = term.values.astype(np.float32)[stage, columns["recompute"], is_single]
                if term.sharded.any():
                    part = term.sharded.astype(np.float32)[stage]
                    whole = (1 - part * of_shards) / (1 - part * (1 - 1 / self._shards))
                    found *= np.where(stage[:, None] > 0, whole, 1)
                for axis, part in term.divided.items():
                    if part.max() > 1e-4:
                        found *= 1 - part.astype(np.float32)[stage] * cut[axis]
                if np.any(term.growth):
                    found *= 1 + np.float32(term.growth) * more_rows
                found = found[:, 0] + found[:, 1] * blocks
                total += found if term.axis is None else np.where(is_split[term.axis], found, 0)
            return total

        # Further micro-batches change neither how many a rank waits for nor those that it has in flight.
        capped = np.minimum(columns["count"], 2 * columns["pipeline"]).astype(np.int64)
        kinds, where = np.unique(
            (columns["pipeline"].astype(np.int64) * 4 + columns["schedule"]) * 2**32 + capped, return_inverse=True
        )
        found = [_waiting(int(each) >> 34, SCHEDULES[int(each) >> 32 & 3], int(each) & (2**32 - 1)) for each in kinds]
        waits, first, last = np.array(found, dtype=np.float32)[where].T
        # One rank of a pipeline has the most micro-batches in flight, another the logits; the first of a V has both.
        is_both, fullest = (columns["schedule"] == 3) | (columns["pipeline"] == 1), np.float32(0)
        for moment in {key[1]: None for key in self._terms if key[0] == "memory"}:
            causes = [key[2] for key in self._terms if key[:2] == ("memory", moment)]
            sizes = {each: value(("memory", moment, each)) for each in causes if each != "activations"}
            rest, logits = sum(sizes.values()), sizes.get("logits", 0)
            for held, added in ((first, np.where(is_both, 0, -logits)), (last, 0)):
                fullest = np.maximum(fullest, rest + added + value(("memory", moment, "activations"), blocks * held))
        return fullest, self._seconds(columns, value, waits)

    def _seconds(self, columns: Columns, value: Any, waits: Any) -> dict[str, Any]:
        """By cause, named as those of `StepTime`."""
        speed, count = self._speed, columns["count"]

        def step(*name: Any) -> Any:
            return (count - 1) * value(("each", *name)) + value(("last", *name))

        names = ("products", "memory-bound operations", "launches")
        found, update = {name: step(name) for name in names}, {name: value(("update", name)) for name in names}
        if speed.is_asynchronous:
            for each in (found, update):
                each["launches"] = np.maximum(each["launches"] - each["products"] - each["memory-bound operations"], 0)
        spent, room = sum(found.values()), found["products"] + found["memory-bound operations"]
        for kind, axis, is_hidden in sorted({key[1:4] for key in self._terms if key[-1] == "count"}):
            ranks, span = _group(axis, columns)
            is_near = span <= speed.devices_per_node
            near = (speed.link_by_kind or {}).get(kind, (speed.link_latency_us, speed.link_gb_per_s))
            latency = np.where(is_near, near[0], speed.network_latency_us) * 1e-6
            bandwidth = np.where(is_near, near[1], speed.network_gb_per_s) * 1e9
            turns, part = message_turns(kind, ranks)
            parts = ((kind, axis, is_hidden, each) for each in ("count", "bytes", "longest"))
            number, size, longest = (step(*each) + value(("update", *each)) for each in parts)
            seconds = np.where(ranks > 1, number * turns * latency + size * part / bandwidth, 0)
            if speed.is_asynchronous and is_hidden:
                # Each pass begins or ends with one message that has nothing beside it.
                exposed = np.maximum(seconds - room, np.minimum(seconds, longest * part / bandwidth))
                room, seconds = np.maximum(room - seconds + exposed, 0), exposed
            name = f"communication over {axis}"
            found[name] = found.get(name, 0) + seconds
        bubble = np.where(columns["pipeline"] > 1, waits * spent / count, 0)
        return found | {"update": sum(update.values()), "bubble": bubble}


def _divided_part(two: Any, one: Any, degree: int) -> Any:
    """The parts of quantities that an axis divides, whose degree makes one out of them the other."""
    cut = np.where(one > 0, 1 - two / np.maximum(one, 1e-30), 0.0)
    return np.clip(cut / (1 - 1 / max(degree, 2)), 0.0, 1.0)


def _group(axis: str, columns: Columns) -> tuple[Any, Any]:
    """The ranks of a group along an axis, and the neighboring ranks that it spans."""
    inner = {each: _product(columns, AXES[AXES.index(each) :]) for each in AXES}
    if axis == "expert":
        return columns["expert"], columns["expert"] * columns["tensor"]
    if axis in ("tensor", "context", "data", "replicas"):
        axis = "data" if axis == "replicas" else axis
        return columns[axis], inner[axis]
    of_batch = _product(columns, ("data", "shard", "context"))
    ranks = {"shard": of_batch // columns["data"], "expert_data": of_batch // columns["expert"], "batch": of_batch}
    return ranks.get(axis, inner["pipeline"]), inner[
        "shard" if axis == "shard" else "data" if axis in ranks else "pipeline"
    ]


@functools.cache
def _waiting(num_ranks: int, schedule: ScheduleName, count: int) -> tuple[float, float, float]:
    """The micro-batches for whose time the ranks of a pipeline wait, and those that the first and the last of them have
    in flight."""
    stages = 2 if schedule in ("interleaved", "zero_bubble_v") else 1
    pipeline = Pipeline(num_ranks, schedule, stages)
    idle, each = idle_fraction(pipeline, count), dict.fromkeys(range(pipeline.num_stages), 1)
    first, last = (most_in_flight(pipeline, rank, count, each) / stages for rank in (0, num_ranks - 1))
    return idle / (1 - idle) * count, first, last
