"""`kitforge plan calibrate`."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kitforge.composition import compose_config
from kitforge.core.parallel.plan.calibrate import measured_device, measured_link, seconds_of
from kitforge.core.parallel.plan.step_time import VIEW, Speed, step_time
from kitforge.core.parallel.world import World
from kitforge.foundation import device as devices
from kitforge.foundation.config import check, from_dict, to_yaml
from kitforge.foundation.log import say
from kitforge.kits.planning import ClusterConfig, plan_memory
from kitforge.kits.registry import kit_of
from kitforge.preset_files import OWN_CONFIGS
from kitforge.trainer.step_trace import step_runner
from kitforge.verify.processes import run_ranks

# Seconds that ranks have to start and to measure.
TIMEOUT = 120.0
# Seconds for which each of the following is repeated.
BUDGET = 2.0
# Small steps, whose times tell those of launches and of bytes: few and short rows, many rows, another family.
STEPS: tuple[dict[str, Any], ...] = (
    {"model": "llama_tiny", "data.batch_size": 1, "data.sequence_length": 16},
    {"model": "llama_tiny", "data.batch_size": 16, "data.sequence_length": 128},
    {"model": "gpt2_tiny", "data.batch_size": 4, "data.sequence_length": 128},
)


def calibrate(choices: dict[str, Any]) -> int:
    """Measure this machine for less than a minute, and print the YAML that `cluster=NAME` needs of it. Of the choices
    `ranks` exchange messages, 2 by default, and `device` is the one that is measured."""
    known = {"ranks": 2, "device": "auto"}
    for name in choices:
        check(name in known, "plan calibrate", name, "ranks=N, device=NAME")
    ranks, device = {**known, **choices}.values()
    check(isinstance(ranks, int) and ranks >= 1, "ranks", ranks, "a whole number of at least 1")
    path = OWN_CONFIGS / "cluster" / "NAME.yaml"
    say(f"# cluster=NAME of kitforge plan, once it is saved as {path} below the folder of runs")
    say(f"# measured with {torch.get_num_threads()} threads and torch {torch.__version__}, without a network")
    say(to_yaml(_rounded(measured_cluster(ranks, devices.pick(device)))).rstrip())
    return 0


def measured_cluster(ranks: int, device: torch.device) -> dict[str, Any]:
    """The values of a `ClusterConfig` of this machine, of which so many ranks measure at once what they share."""
    threads = max(1, torch.get_num_threads() // ranks)
    with tempfile.TemporaryDirectory() as folder:
        # Before this process uses the device, which forks cannot do after it.
        given = ranks, threads, device.type, Path(folder) / "store"
        speed = run_ranks(ranks, _measured_rank, *given, timeout=TIMEOUT)[0]
    memory = devices.free_memory(device)
    size = devices.free_host_memory() / ranks if memory is None else memory
    return {"name": devices.describe(device), "kind": device.type, "memory_gb": size / 2**30, "speed": speed}


def _measured_rank(rank: int, num_ranks: int, threads: int, kind: str, path: Path) -> dict[str, Any]:
    device, link = devices.of_rank(kind, rank, num_ranks), dict[str, float]()
    devices.use(device)
    torch.set_num_threads(threads)
    if num_ranks > 1:
        store = dist.FileStore(str(path), num_ranks)
        dist.init_process_group(devices.backend(kind), store=store, rank=rank, world_size=num_ranks)
        assert dist.group.WORLD is not None
        link = measured_link(dist.group.WORLD, device)
        dist.destroy_process_group()
    speed = {**measured_device(device), "devices_per_node": num_ranks, "is_asynchronous": kind != "cpu", **link}
    return speed | _in_steps(speed, device)


def _in_steps(speed: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The time of a launch and the part of the bandwidth that operations reach, of small training steps: products and
    functions apart, their times are a sum of both, by least squares of relative errors. Behind a device only the host's
    time is seen, that of the first step."""
    rows, left = list[list[float]](), list[float]()
    kit, world = kit_of("text_generation"), World(device=device)
    free = {**speed, "launch_us": 1e-9, "memory_gb_per_s": 1e9}
    for choices in STEPS:
        common = {"device": device.type, "model.vocab_size": 259, "model.num_layers": 2, "trainer.max_steps": 9}
        options = kit.read_options(compose_config("text_generation", common | choices).values)
        traced, cluster = kit.plan(options), ClusterConfig(kind=device.type)
        work = plan_memory(kit, options, cluster).work
        run = step_runner(traced.step(world, traced.num_blocks), options)
        seconds = seconds_of(run, device, BUDGET)
        known = step_time(work, from_dict(Speed, free), options.parallel, 1).seconds
        moved = sum(each.bytes * n for part in work.values() for each, n in part.operations.items() if not each.kind)
        launches = sum(part.counts["launches"] + VIEW * part.counts["views"] for part in work.values())
        left.append((seconds - known) / seconds)
        rows.append([launches * 1e-6 / seconds, moved / 1e9 / speed["memory_gb_per_s"] / seconds])
        if device.type != "cpu":
            return {"launch_us": seconds / launches * 1e6, "memory_fraction": [[1.0, 1.0]]}
    launch, factor = torch.linalg.lstsq(torch.tensor(rows), torch.tensor(left)[:, None]).solution.flatten().tolist()
    return {"launch_us": max(launch, 0.1), "memory_fraction": [[1.0, 1 / max(factor, 1.0)]]}


def _rounded(value: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
