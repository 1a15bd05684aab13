"""`parallel=auto` of `kitforge plan` and `kitforge train`."""

import json
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.table import Column, Table

from kitforge.composition import Composition, compose_config
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.rendezvous import joined, launch_info
from kitforge.foresight import named_cluster, own_cluster
from kitforge.foundation import device as devices
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import console, say
from kitforge.kits.auto_layout import DEGREES, SEARCHED, FoundLayouts, LayoutSearch
from kitforge.kits.planning import GIB, ClusterConfig, MemoryPlan, plan_memory
from kitforge.kits.registry import kit_of
from kitforge.preset_files import presets

# The column of the cause in which a layout is slower.
WHY = "beside the best"


def _given(choices: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What a user has set of the layout, the choices without `parallel`, and the ranks that the given degrees take."""
    given = {name: each for name, each in choices.items() if name.startswith("parallel.") or name in SEARCHED}
    others = {name: each for name, each in choices.items() if name.partition(".")[0] != "parallel"}
    return given, others, math.prod(int(given.get(name, 1)) for name in DEGREES)


def plan_auto(
    task: str,
    choices: Mapping[str, Any],
    cluster: ClusterConfig,
    arguments: Sequence[str],
    write_page: Callable[[str, MemoryPlan, Sequence[Mapping[str, object]]], None] | None,
) -> int:
    """Print the ten best layouts, why each is slower than the best, and the command of the best; `write_page` gets a
    heading, its plan and the rows of all. If none fits, print the one that needs least, and what would; returns 1."""
    given, others, num_given = _given(choices)
    kit, composition = kit_of(task), compose_config(task, others)
    options, ranks = kit.read_options(composition.values), cluster.devices or num_given
    found = LayoutSearch(kit, options, cluster, given, ranks).run()
    best = found.best[0]
    heading = f"{task} {composition.model_name} on {ranks} x {cluster.name}"
    say(f"{heading}: {found.words}")
    if found.fits:
        rows = _rows(found, options, ranks)
        if write_page is not None:
            write_page(heading, plan_memory(kit, best.options, cluster, keeps_course=True), rows)
        table = Table(Column("layout", overflow="fold"), title="the fastest layouts that fit", title_justify="left")
        for name in list(rows[0])[1:]:
            table.add_column(name, justify="left" if name == WHY else "right")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
        changes = best.changes(options)
        left_out = {"parallel", "cluster", "output", *given, *changes}
        kept = [each for each in arguments if not {name := each.partition("=")[0], name.partition(".")[0]} & left_out]
        chosen = (f"{name}={each}" for name, each in (given | changes).items())
        say(f"kitforge train {shlex.join([*kept, *chosen])}")
        return 0
    assert best.plan is not None
    say(f"no layout fits; {best.options.parallel.describe()} needs least, {_over(best.bytes, cluster)}:")
    largest = sorted(best.plan.memory.by_cause.items(), key=lambda pair: -pair[1])[:3]
    say(f"{', '.join(f'{name} {size / GIB:,.2f} GiB' for name, size in largest)} are the most of it")
    if cluster.kind != "cpu" and options.trainer.offload == "none":
        offloaded = replace(best.options, trainer=replace(best.options.trainer, offload="optimizer"))
        say(f"trainer.offload=optimizer: {_over(plan_memory(kit, offloaded, cluster).memory.peak, cluster)}")
    say(f"or about {math.ceil(best.bytes / cluster.usable)} times as many devices")
    return 1


def _over(size: float, cluster: ClusterConfig) -> str:
    over = (size - cluster.usable) / GIB
    return f"{size / GIB:,.2f} GiB, {f'{over:,.2f} GiB too many' if over > 0 else 'which fits'}"


def _rows(found: FoundLayouts, base: Any, ranks: int) -> list[dict[str, str]]:
    """The cells of each layout by column."""
    best, rows = found.best[0], list[dict[str, str]]()
    length = base.data.sequence_length if base.task == "text_generation" else 1
    names = ("GiB", "s a step", f"{'rows' if length == 1 else 'tokens'}/s a device")
    for each in found.best:
        words = " ".join(f"{name.partition('.')[2]}={value}" for name, value in each.changes(base).items())
        rate = (base.data.batch_size or base.data.step_size) * length / ranks / each.seconds
        figures = f"{each.bytes / GIB:,.3g}", f"{each.seconds:,.4g}", f"{rate:,.0f}"
        more = {name: seconds - best.by_cause.get(name, 0.0) for name, seconds in each.by_cause.items()}
        cause = max(more, key=lambda name: more[name])
        why = f"{more[cause]:.2g} s more of {cause}" if each.seconds > best.seconds else "as fast" * (each is not best)
        cells = {name: ("" if each.plan else "~") + cell for name, cell in zip(names, figures, strict=True)}
        rows.append({"layout": words or "one rank", **cells, WHY: why})
    return rows


def found_layout(
    compose: Callable[..., Composition], task: str, choices: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The choices of a training with the layout found, and the names that these replace. The ranks are those that a
    launcher started, for all of which rank 0 finds it; else a rank for each accelerator of this machine, on a CPU as
    many as the given degrees multiply to. Raises ConfigError if no layout fits."""
    given, others, num_given = _given(choices)
    kit, where = kit_of(task), launch_info()
    options = kit.read_options(compose(task, others).values)
    device = devices.pick(options.device)
    local = num_given if device.type == "cpu" else devices.count(device.type)
    local, ranks = (local, local) if where is None else (where.local_world_size, where.world_size)

    def find() -> str:
        return json.dumps(_best_changes(LayoutSearch(kit, options, _cluster_of(options, device, local), given, ranks)))

    if where is None:
        changes = json.loads(find())
    else:
        with joined(ParallelConfig(), options.device, ranks) as rendezvous:
            changes = json.loads(rendezvous.found_by_rank_zero(find))
    return others | given | changes, ["parallel", *given, *changes]


def _cluster_of(options: Any, device: torch.device, local: int) -> ClusterConfig:
    """The devices of a training, of which this machine has so many."""
    name, cluster = own_cluster(options)
    if name is not None:
        return cluster
    # The speed of the data sheet of the accelerator, if there is one, and the memory that this machine has.
    known = [each for each in presets("cluster") if each.partition("_")[0] in devices.describe(device).lower()]
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
    sheet = cluster if device.type == "cpu" else named_cluster((known or ["h100"])[0])
    memory = whole if device.type == "cpu" else devices.total_memory(device) or sheet.memory_gb * GIB
    return replace(sheet, name=device.type, kind=device.type, memory_gb=memory / GIB)


def _best_changes(search: LayoutSearch) -> dict[str, Any]:
    """The options of the best layout. Raises ConfigError if none fits."""
    begun, found = time.monotonic(), search.run()
    best = found.best[0]
    if not found.fits:
        raise ConfigError(
            "no layout of parallel=auto fits the devices",
            got=f"{best.bytes / GIB:,.2f} GiB a rank with {best.options.parallel.describe()}, which needs least",
            expected=f"at most {search.cluster.usable / GIB:,.2f} GiB on each of {search.num_ranks} ranks",
            fix="trainer.offload=optimizer, or more ranks; `kitforge plan ... parallel=auto` says what needs them",
        )
    changes = best.changes(search.options)
    words = " ".join(f"{name}={each}" for name, each in changes.items()) or "one rank"
    say(f"parallel=auto: {words}; found in {time.monotonic() - begun:.0f} s: {found.words}")
    return changes
