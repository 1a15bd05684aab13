"""`parallel=auto`: the layout with the fastest step of those that fit the devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median
from typing import Any

import numpy as np

from kitforge.core.parallel.config import AXES, ParallelConfig
from kitforge.core.parallel.plan.depth import trace_depths
from kitforge.core.parallel.plan.search import RECOMPUTE, SCHEDULES, Columns, Estimate, Probe, legal_layouts, quantities
from kitforge.core.parallel.plan.step_time import Speed
from kitforge.foundation.config import check, from_dict
from kitforge.foundation.errors import ConfigError
from kitforge.kits.kit import AnyKit
from kitforge.kits.planning import ClusterConfig, MemoryPlan, plan_memory, planned_task, trace_rank

# Of a device whose speed is not known: a core of a CPU. It orders layouts.
PEAKS = dict.fromkeys(("fp32", "bf16", "fp16", "fp8"), 0.1)
ASSUMED = Speed(peak_tflops=PEAKS, memory_gb_per_s=10.0, launch_us=5.0, is_asynchronous=False)
# Layouts that are traced: at least of those that fit, and at most of all; and those that are found.
NUM_TRACED, MOST_TRACED, NUM_FOUND = 3, 6, 10
# What a layout of a kind of which none was traced may take of its estimate.
HOPE = 0.9
# Layouts that are estimated at once, which bounds the memory of the search.
CHUNK = 2**17
# The degrees that multiply to the ranks, and all options that are searched.
DEGREES = tuple(f"parallel.{axis}" for axis in AXES)
FURTHER = ("parallel.expert", "parallel.zero_stage", "parallel.schedule")
SEARCHED = (*DEGREES, *FURTHER, "trainer.micro_batch_size", "trainer.activation_checkpointing")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedLayout:
    """A layout with the memory of its fullest rank and its seconds by cause, of the trace `plan` or else estimated."""

    options: Any
    bytes: float
    by_cause: Mapping[str, float]
    plan: MemoryPlan | None = None

    @property
    def seconds(self) -> float:
        """Of a step."""
        return sum(self.by_cause.values())

    def changes(self, base: Any) -> dict[str, Any]:
        """The options by their dotted names in which it is not what the base is."""
        found = dict[str, Any]()
        for section, last in (name.split(".") for name in SEARCHED):
            own, other = (getattr(getattr(options, section), last) for options in (self.options, base))
            found |= {} if own == other else {f"{section}.{last}": own}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundLayouts:
    """The best layouts, the best first; of those that do not fit the one that needs least."""

    best: Sequence[RankedLayout]
    fits: bool
    words: str


class LayoutSearch:
    """The search over the layouts of the options on so many ranks. `given` are the options that a user has set by their
    dotted names, those of `parallel` among them, which `options` leaves at their defaults."""

    def __init__(
        self, kit: AnyKit, options: Any, cluster: ClusterConfig, given: Mapping[str, Any], num_ranks: int
    ) -> None:
        self._kit, self.options, self._given, self.num_ranks = kit, options, given, num_ranks
        self._speed = cluster.speed or ASSUMED
        self.cluster = replace(cluster, speed=self._speed)
        kept = {name.partition(".")[2]: each for name, each in given.items() if name not in SEARCHED}
        self._kept = {name: each for name, each in kept.items() if f"parallel.{name}" in given}
        self._batch = options.data.batch_size or options.data.step_size
        self._length = getattr(options.data, "sequence_length", 0)
        self._rows = 1 if self._length else max(1, self._batch // 64)
        self._refused: dict[str, ConfigError] = {}
        self._recomputes = any(each.init for each in fields(options.trainer) if each.name == "activation_checkpointing")
        self._cuts, self._layers = self._allows({"rows": self._rows}), 1

    def run(self) -> FoundLayouts:
        """Search. Raises ConfigError for options that no layout can have, before the first trace."""
        return self.ordered(*self.estimated())

    def estimated(self) -> tuple[Columns, Estimate, Any, Any]:
        """All layouts, and the bytes of the fullest rank and the seconds of each as estimated."""
        allowed = self._allowed()
        if max(allowed["pipeline"]) > 1:
            self._layers = planned_task(self._kit, self.options, self.cluster)[0].num_blocks
        columns = legal_layouts(self.num_ranks, allowed, self._batch, self._rows, self._layers)
        if not len(columns["data"]):
            raise ConfigError(
                "parallel=auto has no layout with these options",
                got=f"{self._given} on {self.num_ranks} ranks, data.batch_size={self._batch}",
                expected="degrees that multiply to the ranks, and data x shard that divides data.batch_size",
                fix="leave out a degree, or change the number of ranks or data.batch_size",
            )
        estimate = self._estimate(allowed)
        chunks = [slice(at, at + CHUNK) for at in range(0, len(columns["data"]), CHUNK)]
        parts = [estimate.of({name: each[chunk] for name, each in columns.items()}) for chunk in chunks]
        sizes = np.concatenate([size for size, _ in parts])
        return columns, estimate, sizes, np.concatenate([sum(each.values()) for _, each in parts])

    def options_at(self, columns: Columns, at: int) -> Any:
        """The options of a layout."""
        return self._options_of(self._layout(columns, at))

    def _options_of(self, layout: Mapping[str, Any]) -> Any:
        """The options of a layout: those of ParallelConfig, and `rows`, `recompute` and `batch` if they are changed."""
        degrees = {name: each for name, each in layout.items() if name not in ("rows", "recompute", "batch")}
        kept = self._kept if degrees.get("context", 1) > 1 else self._kept | {"context_by": "heads"}
        names = {"rows": "micro_batch_size", "recompute": "activation_checkpointing"}
        trainer = {names[name]: layout[name] for name in names if name in layout}
        data = {"data": replace(self.options.data, batch_size=layout["batch"])} if "batch" in layout else {}
        parallel = from_dict(ParallelConfig, kept | degrees, "parallel")
        return replace(self.options, parallel=parallel, trainer=replace(self.options.trainer, **trainer), **data)

    def _allows(self, layout: Mapping[str, Any], name: str = "") -> bool:
        """Whether a real run takes these options; what it says of the first that it does not is kept under the name."""
        try:
            options = self._options_of(layout)
            self._kit.check_parallel(replace(options, trainer=replace(options.trainer, offload="none")))
        except ConfigError as error:
            self._refused.setdefault(name, error)
            return False
        return True

    def _allowed(self) -> dict[str, list[int]]:
        """The values that each column may have, each tried by itself."""
        peaks, given = self._speed.peak_tflops, self._given
        if self.options.precision not in peaks:
            raise ConfigError(
                "parallel=auto orders layouts by time, for which the cluster has no peak speed in this precision",
                got=f"precision={self.options.precision}; {self.cluster.name} has peak_tflops of {', '.join(peaks)}",
                fix=f"precision={next(iter(peaks))}, or peak_tflops in a file of your own, configs/cluster/NAME.yaml",
            )
        for name in ("copies", "stages_per_rank"):
            check(name not in self._kept, f"parallel.{name}", self._kept.get(name), "no value beside parallel=auto")
        found, divisors = {}, [each for each in range(1, self.num_ranks + 1) if self.num_ranks % each == 0]

        def tried(name: str, values: Sequence[Any], further: Mapping[str, Any]) -> list[Any]:
            values = [given[f"parallel.{name}"]] if f"parallel.{name}" in given else values
            legal = [each for each in values if self._allows({**further, name: each}, name)]
            if not legal:
                raise self._refused[name]
            return legal

        for axis in AXES:
            found[axis] = tried(axis, divisors, {})
        found["context"] = [each for each in found["context"] if not self._length % each] or found["context"]
        fixed = given.get("parallel.expert")
        experts = [each for each in divisors if self._allows({"data": each, "expert": each}, "expert")]
        found["expert"] = experts if fixed is None else tried("expert", [fixed], {"data": fixed})
        least = {axis: min((each for each in found[axis] if each > 1), default=1) for axis in AXES}
        found["zero"] = tried("zero_stage", (1, 2, 3) if least["shard"] > 1 else (3,), {"shard": least["shard"]})
        names = tried("schedule", SCHEDULES if least["pipeline"] > 1 else ("1f1b",), {"pipeline": least["pipeline"]})
        found["schedule"] = [SCHEDULES.index(each) for each in names]
        mode = self.options.trainer.activation_checkpointing
        is_free = self._recomputes and "trainer.activation_checkpointing" not in given
        found["recompute"] = [0, 1, 2] if is_free else [RECOMPUTE.index(mode)]
        if "trainer.micro_batch_size" in given or not self._cuts:
            found["rows"] = [self.options.trainer.micro_batch_size or self._batch]
        return found

    def _probe(self, layout: Mapping[str, Any]) -> Probe:
        """Two micro-batches on each replica, or as many as `count`, at two depths of the network."""
        layout = {**layout}
        rows, count = layout.get("rows", self._rows), layout.pop("count", 1 + self._cuts)
        batch = count * rows * layout.get("data", 1) * layout.get("shard", 1)
        options = self._options_of({**layout, **({"rows": rows} if self._cuts else {}), "batch": batch})
        traced, options = planned_task(self._kit, options, self.cluster)
        self._layers, depths = traced.num_blocks, trace_depths(traced.kinds, traced.num_blocks)[:2]
        depths = (max(depths[0] - 1, 1), depths[0]) if len(depths) == 1 else depths
        traces = [trace_rank(traced, options, self.cluster, depth) for depth in depths]
        one, two = (quantities(each.memory, each.work, self._speed) for each in traces)
        found, more = {}, max(depths[1] - depths[0], 1)
        for key in one.keys() | two.keys():
            # At most its part of all: the peak of a moment may lie elsewhere in the deeper network.
            last = two.get(key, 0)
            block = min(max(last - one.get(key, 0), 0) / more, last / depths[1])
            found[key] = np.array([last - depths[1] * block, block])
        return found

    def _estimate(self, allowed: Mapping[str, Sequence[int]]) -> Estimate:
        """From probes with shards, if there may be some: FSDP casts weights otherwise than one rank does."""
        least = {axis: min((each for each in allowed[axis] if each > 1), default=1) for axis in (*AXES, "expert")}
        modes = [{"recompute": RECOMPUTE[each]} for each in allowed["recompute"]] if self._recomputes else [{}]
        sharded = {"shard": least["shard"], "zero_stage": max(allowed["zero"])} if least["shard"] > 1 else {}
        first = {**modes[0], **sharded}
        base = self._probe(first)
        stages = {each: {**first, "zero_stage": each} for each in allowed["zero"] if sharded} | {0: modes[0]}
        several = {each: base if layout == first else self._probe(layout) for each, layout in stages.items()}
        single = {each: self._probe(layout | {"count": 1}) if self._cuts else base for each, layout in stages.items()}
        by_stage = [(several.get(each, base), single.get(each, base)) for each in range(4)]
        # By the index of `RECOMPUTE`; of one that is not searched it is not asked.
        by_mode = [base] * 3
        for at, mode in list(zip(allowed["recompute"], modes, strict=False))[1:]:
            by_mode[at] = self._probe({**first, **mode})
        by_axis = {"rows": [(base, self._probe({**first, "rows": 2 * self._rows}), 2)]} if self._cuts else {}
        for axis in ("data", "tensor", "context", "expert"):
            if (degree := least[axis]) == 1:
                continue
            by_axis[axis], in_buckets = [], axis in ("data", "context")
            if sharded or not in_buckets:
                replicas = {"data": degree} if axis == "expert" else {}
                before = self._probe({**first, **replicas}) if replicas else base
                by_axis[axis].append((before, self._probe({**first, **replicas, axis: degree}), degree))
            if in_buckets:
                # Without shards gradients are reduced in buckets, over both axes together.
                has_both = axis == "context" and "data" in by_axis
                alone = modes[0] | ({"data": least["data"]} if has_both else {})
                before = by_axis["data"][-1][1] if has_both else several[0]
                by_axis[axis].append((before, self._probe({**alone, axis: degree}), degree))
        return Estimate(by_mode, by_stage, by_axis, self._speed, (least["shard"], self._rows, self._layers))

    def _layout(self, columns: Columns, at: int) -> dict[str, Any]:
        """The options of a layout, as `_options_of` takes them."""
        one = {name: int(column[at]) for name, column in columns.items()}
        found: dict[str, Any] = {name: one[name] for name in (*AXES, "expert")} | {"zero_stage": one["zero"]}
        found |= {"schedule": SCHEDULES[one["schedule"]]}
        if self._cuts and "trainer.micro_batch_size" not in self._given:
            found["rows"] = one["rows"] if one["count"] > 1 else None
        return found | ({"recompute": RECOMPUTE[one["recompute"]]} if self._recomputes else {})

    def _trace(self, layouts: "_Candidates") -> list[RankedLayout]:
        """Trace the fastest by the estimate, correct that of its kind, and so on; if none fits the one that needs
        least."""
        usable, traced = self.cluster.usable, list[RankedLayout]()
        while len(traced) < MOST_TRACED and layouts.is_open.any():
            time, size = layouts.corrected(HOPE)
            known = sorted(each.seconds for each in traced if each.bytes <= usable)
            can_fit = layouts.is_open & (size <= usable)
            if is_last := not can_fit.any():
                can_fit, time = layouts.is_open, size
            at = int(np.argmin(np.where(can_fit, time, np.inf)))
            if (is_last and known) or (len(known) >= NUM_TRACED and time[at] > known[NUM_TRACED - 1]):
                break
            if (options := self._taken(layouts, at)) is None:
                continue
            plan = plan_memory(self._kit, options, self.cluster)
            by_cause = getattr(plan.time(self.cluster), "by_cause", {})
            traced.append(RankedLayout(options=options, bytes=plan.memory.peak, by_cause=by_cause, plan=plan))
            layouts.correct(at, traced[-1])
            if is_last:
                break
        return traced

    def _taken(self, layouts: "_Candidates", at: int) -> Any:
        """The options of a layout, which is open no more; None if a real run does not take them."""
        if self._allows(self._layout(layouts.columns, at)):
            layouts.is_open[at] = False
            return self.options_at(layouts.columns, at)
        # Nor any with the same degrees.
        names = [name for name in layouts.columns if name not in ("rows", "count", "recompute")]
        same = [layouts.columns[name] == layouts.columns[name][at] for name in names]
        layouts.is_open &= ~np.logical_and.reduce(same)
        return None

    def ordered(self, columns: Columns, estimate: Estimate, sizes: Any, seconds: Any) -> FoundLayouts:
        """The best of those traced and estimated."""
        layouts = _Candidates(columns, sizes, seconds)
        traced, usable = self._trace(layouts), self.cluster.usable
        fitting = sorted((each for each in traced if each.bytes <= usable), key=lambda each: each.seconds)
        estimated, (time, size) = list[RankedLayout](), layouts.corrected(1.0)
        while fitting and len(estimated) < NUM_FOUND and (can_fit := layouts.is_open & (size <= usable)).any():
            at = int(np.argmin(np.where(can_fit, time, np.inf)))
            if (options := self._taken(layouts, at)) is not None:
                causes = estimate.of({name: each[at : at + 1] for name, each in columns.items()})[1]
                # As a trace names the group, which is one of fewer axes without context.
                axis, own = ("batch", "data") if columns["context"][at] == 1 else ("shard", "fsdp")
                named = {name.replace(f"over {axis}", f"over {own}"): each for name, each in causes.items()}
                by_cause = {name: float(time[at] / seconds[at] * np.ravel(each)[0]) for name, each in named.items()}
                estimated.append(RankedLayout(options=options, bytes=float(size[at]), by_cause=by_cause))
        words = (
            f"{len(sizes):,} layouts, {int((size <= usable).sum()):,} fit; {len(traced)} traced, others estimated (~)"
        )
        words += "; times by an assumed speed" if self._speed is ASSUMED else ""
        # The best was traced, so that it is known to fit.
        others = sorted([*fitting[1:], *estimated], key=lambda each: each.seconds)
        best = [fitting[0], *others][:NUM_FOUND] if fitting else [min(traced, key=lambda each: each.bytes)]
        return FoundLayouts(best=best, fits=bool(fitting), words=words)


class _Candidates:
    """The layouts that are still open, and how far the estimate is off by their kind, the axes that are split."""

    def __init__(self, columns: Columns, sizes: Any, seconds: Any) -> None:
        self.columns, self._sizes, self._seconds = columns, sizes, seconds
        self.is_open = np.ones(len(sizes), dtype=bool)
        self._kind = sum((columns[axis] > 1).astype(np.int32) << bit for bit, axis in enumerate((*AXES, "expert")))
        self._ratios: dict[int, tuple[float, float]] = {}

    def corrected(self, hope: float) -> tuple[Any, Any]:
        """The seconds and the bytes of each. `hope`: what one of a kind that was not traced may take of its time."""
        known = [median(each) for each in zip(*self._ratios.values(), strict=True)] or [1.0, 1.0]
        unknown = min(known[0], 1.0) * hope if hope < 1 else known[0], known[1]
        table = np.array([self._ratios.get(each, unknown) for each in range(2 * 2 ** len(AXES))], np.float32)
        return self._seconds * table[self._kind, 0], self._sizes * table[self._kind, 1]

    def correct(self, at: int, true: RankedLayout) -> None:
        """Those of a kind by one that was traced."""
        ratio = true.seconds / float(self._seconds[at]), true.bytes / float(self._sizes[at])
        self._ratios[int(self._kind[at])] = ratio
