"""`kitforge plan`."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from kitforge.cli.calibrate import calibrate
from kitforge.composition import compose_config, nested, parse, task_of
from kitforge.core.parallel.plan.memory import CAUSES
from kitforge.core.parallel.plan.step_time import StepTime
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, nearest
from kitforge.foundation.log import console, say
from kitforge.kits.planning import (
    GIB,
    ClusterConfig,
    MemoryPlan,
    fill_cluster,
    plan_memory,
    plans_that_save,
    rows_at_once,
)
from kitforge.kits.registry import kit_of
from kitforge.preset_files import presets
from kitforge.yaml_options import read_yaml, to_plain_dict


def plan(arguments: list[str]) -> int:
    """Print the memory that a rank of a run will need and the time of a step, by cause, and what to change if a device
    has less memory. Returns 1 if it has less. `calibrate` measures this machine instead."""
    if arguments[:1] == ["calibrate"]:
        return calibrate(_choices(arguments[1:]))
    choices = _choices(arguments)
    cluster = _cluster({name: choices.pop(name) for name in list(choices) if name.partition(".")[0] == "cluster"})
    task = task_of(choices)
    kit, composition = kit_of(task), compose_config(task, choices)
    options = fill_cluster(kit.read_options(composition.values), cluster)
    found = plan_memory(kit, options, cluster)
    ranks = options.parallel.world_size
    say(f"{task} {composition.model_name} on {ranks} x {cluster.name}, {options.parallel.describe()}")
    length = getattr(options.data, "sequence_length", None)
    of_tokens = "" if length is None else f" of {length:,} tokens"
    say(f"{rows_at_once(options)} rows{of_tokens} at once on each replica")
    if len(found.by_index) > 1:
        peaks = [_gib(size) for size in sorted(each.peak for each in found.by_index.values())]
        say(f"rank {found.fullest} of parallel.pipeline={options.parallel.pipeline} needs the most")
        say(f"its ranks {', '.join(map(str, found.by_index))} need {peaks[0]} to {peaks[-1]} GiB")
    console.print(_table(found, cluster))
    if found.memory.host:
        say(f"and {_gib(found.memory.host)} GiB in the memory of the host (trainer.offload={options.trainer.offload})")
    time = found.time(cluster)
    if time is None:
        what = f"cluster.speed with {options.precision}"
        say(f"no time: {cluster.name} has no {what}; on a machine with it `kitforge plan calibrate` measures one")
    else:
        console.print(_time_table(time))
        say(_throughput(time, options, cluster))
    for doubt in found.doubts:
        say(f"not exact: {doubt}")
    fits = _verdict(found, cluster)
    if not fits:
        _say_what_would_fit(found, plans_that_save(kit, found, cluster), cluster)
    return int(not fits)


def _choices(arguments: list[str]) -> dict[str, Any]:
    found = {}
    for argument in arguments:
        if argument.startswith("-"):
            raise ConfigError(f"unknown flag {argument!r}", fix="options are name=value: cluster=h100")
        name, values = parse(argument)
        if len(values) > 1:
            raise ConfigError("a plan is of one configuration", got=argument, fix=f"plan each value of {name} alone")
        found[name] = values[0]
    return found


def _cluster(choices: dict[str, Any]) -> ClusterConfig:
    """The devices that `cluster` names, with single values over them."""
    name, known = str(choices.pop("cluster", "cpu")), presets("cluster")
    if name not in known:
        raise ConfigError(f"unknown device {name!r}", expected=", ".join(known), fix=nearest(name, known))
    values = to_plain_dict(read_yaml(known[name]))
    return from_dict(ClusterConfig, values | nested(choices).get("cluster", {}), "cluster")


def _table(found: MemoryPlan, cluster: ClusterConfig) -> Table:
    """Bytes by cause at the peak, the largest first."""
    table = Table(title=f"memory of a rank, at its peak in the {found.memory.moment}", title_justify="left")
    table.add_column("cause")
    table.add_column("GiB", justify="right")
    table.add_column(f"of {cluster.name}", justify="right")
    sizes = found.memory.by_cause
    for cause in sorted(CAUSES, key=lambda name: -sizes[name]):
        if sizes[cause]:
            table.add_row(cause, _gib(sizes[cause]), f"{sizes[cause] / GIB / cluster.memory_gb:.1%}")
    table.add_row("all", _gib(found.memory.peak), f"{found.memory.peak / GIB / cluster.memory_gb:.1%}", style="bold")
    return table


def _verdict(found: MemoryPlan, cluster: ClusterConfig) -> bool:
    left = cluster.usable - found.memory.peak
    room = f"{_gib(cluster.usable)} GiB of {cluster.memory_gb:g} are for tensors (cluster.reserve={cluster.reserve:g})"
    say(
        f"it fits: {_gib(left)} GiB are left; {room}"
        if left >= 0
        else f"it does not fit: {_gib(-left)} GiB too many; {room}"
    )
    return left >= 0


def _say_what_would_fit(found: MemoryPlan, further: Iterator[MemoryPlan], cluster: ClusterConfig) -> None:
    """The changes one after the other, each with the peak it leads to, when it has been traced."""
    say("changes that save memory, one after the other:")
    for each in further:
        fits = "fits" if each.memory.peak <= cluster.usable else f"{_gib(each.memory.peak - cluster.usable)} too many"
        saved = f"{_gib(found.memory.peak - each.memory.peak)} GiB less{_slowdown(found, each, cluster)}"
        say(f"  {each.changes[-1]:<46} {_gib(each.memory.peak):>9} GiB  {saved}  {fits}")
        found = each
    if found.memory.peak > cluster.usable:
        times = -(-found.memory.peak // cluster.usable)
        say(f"  then about {times} times as many devices, with parallel.shard or parallel.tensor")


def _time_table(time: StepTime) -> Table:
    """Seconds of a step by cause, the longest first."""
    table = Table(title="time of a step", title_justify="left")
    for name in ("cause", "ms", "of it"):
        table.add_column(name, justify="left" if name == "cause" else "right")
    for cause, seconds in sorted(time.by_cause.items(), key=lambda each: -each[1]):
        if seconds > 0:
            table.add_row(cause, f"{1e3 * seconds:,.2f}", f"{seconds / time.seconds:.1%}")
    table.add_row("all", f"{1e3 * time.seconds:,.2f}", "100.0%", style="bold")
    return table


def _throughput(time: StepTime, options: Any, cluster: ClusterConfig) -> str:
    """MFU against the peak of the precision, tokens of packed rows or rows a second, and the price of a million; of a
    task with rollouts the MFU of an update alone."""
    assert cluster.speed is not None
    ranks, peak = options.parallel.world_size, cluster.speed.peak_tflops[options.precision]
    words = f"MFU {time.flops / time.seconds / peak / 1e12:.1%} of {peak:g} TFLOP/s in {options.precision}"
    if hasattr(options, "rollout"):
        return f"{words}, of an update without its rollouts"
    data, is_packed = options.data, options.task == "text_generation"
    unit, length = ("tokens", data.sequence_length) if is_packed else ("rows", 1)
    rate = getattr(data, "step_size", data.batch_size) * length / time.seconds
    words = f"{rate:,.0f} {unit}/s, {rate / ranks:,.0f} a device, {words}"
    if cluster.price_per_hour is None:
        return words
    price = cluster.price_per_hour * ranks / 3600 / rate * 1e6
    return f"{words}, {price:.4g} {cluster.currency} for a million {unit}"


def _slowdown(before: MemoryPlan, after: MemoryPlan, cluster: ClusterConfig) -> str:
    """What a change costs in time."""
    one, two = before.time(cluster), after.time(cluster)
    return "" if one is None or two is None else f" for {two.seconds / one.seconds - 1:+.0%} time"


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
