"""`kitforge plan`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from kitforge.cli.auto import plan_auto
from kitforge.cli.calibrate import calibrate
from kitforge.composition import compose_config, nested, parse, task_of
from kitforge.core.parallel.plan.step_time import StepTime
from kitforge.foresight import named_cluster
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.files import check_own, mark_own, user_path, write_text
from kitforge.foundation.log import console, say
from kitforge.kits.dry_task import rows_at_once
from kitforge.kits.planning import GIB, ClusterConfig, MemoryPlan, fill_cluster, plan_memory, plans_that_save
from kitforge.kits.registry import kit_of
from kitforge.report.plan_page import DrawnPass, plan_page


def plan(arguments: list[str]) -> int:
    """Print the memory that a rank of a run will need and the time of a step, by cause, and what to change if a device
    has less memory. Returns 1 if it has less. `calibrate` measures this machine instead."""
    if arguments[:1] == ["calibrate"]:
        return calibrate(_choices(arguments[1:]))
    choices = _choices(arguments)
    values = {name: choices.pop(name) for name in list(choices) if name.startswith("cluster.")}
    cluster = named_cluster(str(choices.pop("cluster", "cpu")), nested(values).get("cluster"))
    output = user_path(str(choices.pop("output"))) if "output" in choices else None
    if output is not None:
        check_own(output, "plan", overwrite=bool(choices.get("overwrite")))
    task = task_of(choices)
    if choices.get("parallel") == "auto":
        write = None if output is None else partial(_write_page, output, cluster)
        return plan_auto(task, choices, cluster, arguments, write)
    kit, composition = kit_of(task), compose_config(task, choices)
    options = fill_cluster(kit.read_options(composition.values), cluster)
    found = plan_memory(kit, options, cluster, keeps_course=output is not None)
    ranks = options.parallel.world_size
    say(f"{task} {composition.model_name} on {ranks} x {cluster.name}, {options.parallel.describe()}")
    length = getattr(options.data, "sequence_length", None)
    of_tokens = "" if length is None else f" of {length:,} tokens"
    say(f"{rows_at_once(options)} rows{of_tokens} at once on each replica")
    if len(found.by_index) > 1:
        peaks = [_gib(size) for size in sorted(each.peak for each in found.by_index.values())]
        say(f"rank {found.fullest} of parallel.pipeline={options.parallel.pipeline} needs the most")
        say(f"its ranks {', '.join(map(str, found.by_index))} need {peaks[0]} to {peaks[-1]} GiB")
    title, columns = f"memory of a rank, at its peak in the {found.memory.moment}", ("GiB", f"of {cluster.name}")
    console.print(_table(title, columns, found.memory.by_cause, _gib, cluster.memory_gb * GIB))
    if found.memory.host:
        say(f"and {_gib(found.memory.host)} GiB in the memory of the host (trainer.offload={options.trainer.offload})")
    time = found.time(cluster)
    if time is None:
        what = f"cluster.speed with {options.precision}"
        say(f"no time: {cluster.name} has no {what}; on a machine with it `kitforge plan calibrate` measures one")
    else:
        seconds = time.by_cause, lambda each: f"{1e3 * each:,.2f}", time.seconds
        console.print(_table("time of a step", ("ms", "of it"), *seconds))
        say(_throughput(time, options, cluster))
    for doubt in found.doubts:
        say(f"not exact: {doubt}")
    fits = _verdict(found, cluster)
    if output is not None:
        _write_page(output, cluster, f"{composition.model_name} on {ranks} x {cluster.name}", found)
    if not fits:
        _say_what_would_fit(found, plans_that_save(kit, found, cluster), cluster)
    return int(not fits)


def _write_page(
    path: Path, cluster: ClusterConfig, heading: str, found: MemoryPlan, layouts: Sequence[Mapping[str, object]] = ()
) -> None:
    """The page of a plan, without a network."""
    left, time = cluster.usable - found.memory.peak, found.time(cluster)
    room = "are left of" if left >= 0 else "are missing beside"
    words = [found.options.parallel.describe(), f"{_gib(abs(left))} GiB {room} {_gib(cluster.usable)} for tensors"]
    words += [] if time is None else [_throughput(time, found.options, cluster)]
    words += [f"not exact: {each}" for each in found.doubts]
    passes = [] if time is None else [[DrawnPass(*each, *ends) for each, *ends in rank] for rank in time.passes]
    seconds = None if time is None else time.by_cause
    write_text(path, plan_page(heading, words, found.memory.course, passes, seconds, layouts))
    mark_own(path, "plan")
    say(f"wrote {path}")


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


def _table(
    title: str, columns: Sequence[str], figures: Mapping[str, float], text: Callable[[float], str], whole: float
) -> Table:
    """The figures by cause that are above zero, the largest first, and their sum, each with its part of the whole."""
    table = Table("cause", title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    for cause, each in sorted(figures.items(), key=lambda pair: -pair[1]):
        if each > 0:
            table.add_row(cause, text(each), f"{each / whole:.1%}")
    last = sum(figures.values())
    table.add_row("all", text(last), f"{last / whole:.1%}", style="bold")
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
        one, two = found.time(cluster), each.time(cluster)
        slowdown = "" if one is None or two is None else f" for {two.seconds / one.seconds - 1:+.0%} time"
        saved = f"{_gib(found.memory.peak - each.memory.peak)} GiB less{slowdown}"
        say(f"  {each.changes[-1]:<46} {_gib(each.memory.peak):>9} GiB  {saved}  {fits}")
        found = each
    if found.memory.peak > cluster.usable:
        times = -(-found.memory.peak // cluster.usable)
        say(f"  then about {times} times as many devices, with parallel.shard or parallel.tensor")


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


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size > GIB / 10 else f"{size / GIB:.2g}"
