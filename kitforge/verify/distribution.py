"""Contracts of ranks and tiers: N ranks equal one, and a cache of table rows is invisible."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kitforge.core.parallel.rendezvous import code_version
from kitforge.foundation.errors import ConfigError, KitforgeError
from kitforge.verify.case import DEGREES, OF_DEGREES, PRECISE, RUN_TIMEOUT, Case
from kitforge.verify.contract import Contract, Measured, NotOfferedError, furthest
from kitforge.verify.processes import free_port, launched, run_ranks
from kitforge.verify.run_equality import distance, run_differences

# Sums over ranks are rounded otherwise in float32, and every step builds on the ones before.
LAYOUT_BOUND = 2e-4
# Without it, the sequences of a batch have to be cut, too.
WHOLE_SEQUENCES = "parallel.sequence_parallel"
# Of a pipeline: each rank with two stages, and gradients of weights that wait; and with one. Losses of which stages do
# not know the inputs take the relay. More micro-batches than one.
ORDERS: list[dict[str, Any]] = [{"parallel.schedule": "zero_bubble_v"}, {}]
ORDERS = [each | {"trainer.micro_batch_size": 2} for each in ORDERS]
# Rows of the device tier, from few to many; the first that holds a batch is taken.
CACHE_ROWS = (16, 32, 64, 128, 256, 1024, 4096, 16384)


def layouts(case: Case) -> list[dict[str, Any]]:
    """Degrees of two ranks, and those that were given, as far as the task can be cut so and the machine has devices
    for it. Raises NotOfferedError where none is left."""
    data, shard, context, tensor, pipeline = ({name: 2} for name in DEGREES)
    by_keys = context | {"parallel.context_by": "keys"}
    wanted: list[list[dict[str, Any]]] = [[data], [shard], [context], [tensor, tensor | {WHOLE_SEQUENCES: False}]]
    wanted += [[by_keys | {"parallel.copies": 2}, by_keys], [pipeline | each for each in ORDERS]]
    if any(name.startswith("model.experts.") for name in case.values):
        wanted.append([data | {"parallel.expert": 2}])
    given = {name: value for name, value in case.degrees.items() if value != OF_DEGREES.get(name, 1)}
    if case.num_ranks > 1 and given not in [each[0] for each in wanted]:
        wanted.append([given])
    found = [degrees for ways in wanted if (degrees := next((way for way in ways if _can_run(case, way)), None))]
    if not found:
        raise NotOfferedError("this machine, or this network, has no second rank")
    return found


def _can_run(case: Case, degrees: Mapping[str, Any]) -> bool:
    try:
        options = case.options(degrees)
        case.kit.check_parallel(options)
    except ConfigError:
        return False
    has_accelerator = case.values["device"] != "cpu" and torch.accelerator.is_available()
    return not has_accelerator or torch.accelerator.device_count() >= int(options.num_ranks)


def import_sharding() -> None:
    """Import what sharded parameters need, which takes seconds, and hash the code, before forks become ranks."""
    code_version()
    for module in ("torch.distributed.fsdp", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"):
        importlib.import_module(module)


def on_layouts(
    case: Case,
    name: str,
    changes: Mapping[str, Any],
    prepare: Callable[[Path, Path], object] = lambda _base, _folder: None,
) -> Measured:
    """Losses and gradient norms under every layout against those of the undisturbed run, from which `prepare` may fill
    the folder that each is trained in."""
    # The undisturbed run in fp32, which is another one where the run is in half precision.
    base = case.base if case.values["precision"] == "fp32" else case.folder / "fp32"
    if not base.exists():
        case.start(base.name, PRECISE).result(RUN_TIMEOUT)
    changes, figures, names = {**changes, **PRECISE}, list[float](), list[str]()
    for degrees in layouts(case):
        words = " x ".join(f"{axis.removeprefix('parallel.')}={degree}" for axis, degree in degrees.items())
        folder = f"{name}/{words.replace(' ', '')}"
        prepare(base, case.folder / folder)
        num_ranks, port = case.options(degrees).num_ranks, free_port()

        def work(rank: int, num_ranks: int, port: int, *given: Any) -> None:
            launched(rank, num_ranks, port, case.train, *given)

        run_ranks(num_ranks, work, num_ranks, port, folder, {**changes, **degrees}, timeout=RUN_TIMEOUT)
        figures.append(distance(case.folder / folder, base))
        names.append(words)
    return Measured(figure=furthest(figures), bound=LAYOUT_BOUND, unit=f"relative, {', '.join(names)}")


def check_ranks(case: Case) -> Measured:
    """Losses and gradient norms of runs on several ranks against those of one."""
    return on_layouts(case, "ranks", {})


def check_cache(case: Case) -> Measured:
    """A run whose tables hold few rows on the device, with prefetching, against the one that holds them all."""
    if not case.has("cache.device_rows"):
        raise NotOfferedError("the task has no tables of rows")
    tried = None
    for rows in CACHE_ROWS:
        changes = {"cache.device_rows": rows, "cache.prefetch_batches": 2, "cache.fail_on_overflow": True}
        try:
            folder = case.train(f"cached/{rows}", changes)
        except KitforgeError as error:
            # Too few for a batch.
            tried = error
            continue
        found = run_differences(folder, case.base, with_state=False)
        named = f": {', '.join(found[:3])}" if found else ""
        return Measured(figure=len(found), unit=f"values differ with {rows} rows on the device{named}")
    assert tried is not None
    raise tried


CONTRACTS = (
    Contract(name="ranks", promise="N ranks = 1", check=check_ranks),
    Contract(name="cache", promise="cached = uncached", check=check_cache),
)
