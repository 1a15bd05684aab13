"""At what rate two ranks save a sharded state, against the plain rate of the same disk in the same run.

The state is a GPT-2's parameters and their two AdamW moments in fp32, every tensor cut over two ranks. Plain is what no
checkpoint can beat: each rank writes as many bytes as it owns, a mebibyte at a time, and flushes them to the disk.
The same save with SHA-256 of every file, as a process that saves alone takes it, shows what the quick checksum is for.

Run from the checkout: `python -m benchmarks.parallel.checkpoint [--rounds 9] [--folder PLACE]`; it writes its table to
benchmarks/parallel/checkpoint.md. Contestants take turns and medians are shown. A save is timed from the return of
`save` to the published folder; the copy before it, for which training waits, has a column of its own. What was written
is deleted, and the disk left to come to rest, before the next is timed.
"""

import datetime
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from benchmarks.command_line import CommandLine, write_result
from benchmarks.core.checkpoint_stall import moments, parameters
from kitforge.core.checkpoint import safetensors_file
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.foundation.device import describe, pick

TABLE = Path(__file__).with_suffix(".md")
RANKS = 2
SIZE = (9, 512, 12288)  # layers, dim, vocabulary: about 400 MB with both moments
SMOKE = {"SIZE": (1, 16, 64), "rounds": 1}
Times = dict[str, list[float]]


def sharded() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Layout]]:
    """This rank's halves of the model and of its moments, and how they are cut."""
    halves = {name: tensor[: -(-len(tensor) // RANKS)].clone() for name, tensor in parameters(*SIZE).items()}
    states = moments(halves)
    layouts = {
        name: Layout(shape=(RANKS * len(tensor), *tensor.shape[1:])).split("shard", 0, RANKS)
        for name, tensor in (*halves.items(), *states.items())
        if tensor.dim()
    }
    return halves, states, layouts


def seconds(*works: Callable[[], object]) -> list[float]:
    """How long each of the works takes, one right after another, on the slowest rank; all ranks begin together."""
    dist.barrier()
    marks = [time.perf_counter()]
    for work in works:
        work()
        marks.append(time.perf_counter())
    taken = torch.tensor(marks, dtype=torch.float64).diff()
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return taken.tolist()


def write_plainly(path: Path, data: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(data), 2**20):
            file.write(data[start : start + 2**20])
        os.fsync(file.fileno())


@contextmanager
def slow_checksum() -> Iterator[None]:
    quick = safetensors_file.Crc32
    safetensors_file.Crc32 = hashlib.sha256  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        safetensors_file.Crc32 = quick  # type: ignore[misc]


def measure(rank: int, root: Path, rounds: int) -> tuple[Times, int, int]:
    """Times by name, the bytes of the whole state, and the bytes of tensor files that a save has written."""
    model, optimizer, layouts = sharded()
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(shard=RANKS), "cpu"))
    tensors = [*model.values(), *optimizer.values()]
    # Counters are whole on all ranks and are written by one.
    num_state = sum(tensor.nbytes * (RANKS if tensor.dim() else 1) for tensor in tensors)
    data = torch.cat([tensor.reshape(-1) for tensor in tensors if tensor.dim()]).view(torch.uint8).numpy().data
    writer = CheckpointWriter(root / "checkpoints", keep_last=10**6, world=world)
    times: Times = {name: [] for name in ("plain", "copy", "save", "sha256", "verify")}
    num_written = 0

    def save(step: int) -> list[float]:
        stream: dict[str, Any] = {"model": model.items(), "optimizer": optimizer.items()}
        return seconds(lambda: writer.save(step, **stream, state={}, layouts=layouts), writer.wait)

    def rest(*left: Path) -> None:
        dist.barrier()
        for path in left if rank == 0 else ():
            shutil.rmtree(path)
        if rank == 0:
            os.sync()
        dist.barrier()

    for step in range(rounds + 1):
        folder = step_folder(root / "checkpoints", step)
        plain = root / "plain"
        plain.mkdir(exist_ok=True)
        times["plain"] += seconds(partial(write_plainly, plain / f"{rank}", data))
        rest(plain)
        copy, write = save(step)
        times["copy"].append(copy)
        times["save"].append(write)
        num_written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        times["verify"] += seconds(partial(open_checkpoint, folder, world=world))
        rest(folder)
        with slow_checksum():
            times["sha256"].append(save(step)[1])
        rest(folder)
    writer.close()
    return {name: values[1:] for name, values in times.items()}, num_state, num_written


def rank_main(rank: int, meeting: str, root: str, rounds: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{meeting}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    results = measure(rank, Path(root), rounds)
    if rank == 0:
        write_result(TABLE, table(*results, rounds))
    dist.destroy_process_group()


def table(times: Times, num_state: int, num_written: int, rounds: int) -> str:
    median = {name: statistics.median(values) for name, values in times.items()}
    rate = {name: num_state / value / 1e6 for name, value in median.items()}
    spread = f"{num_state / max(times['plain']) / 1e6:,.0f} to {num_state / min(times['plain']) / 1e6:,.0f}"
    rows = {
        "plain writes": ("plain", ""),
        "save": ("save", f"{median['copy'] * 1e3:.0f}"),
        "save with SHA-256": ("sha256", ""),
        "verify at opening": ("verify", ""),
    }
    lines = [
        "# Saving from two ranks",
        "",
        f"{describe(pick('cpu'))}, torch {torch.__version__}, {datetime.date.today()}; medians of {rounds} rounds; "
        f"load average {os.getloadavg()[0]:.1f} at the end (2 are ours).",
        f"State: {num_state / 1e6:,.1f} MB. Tensor files: {num_written / 1e6:,.1f} MB, headers included, which is "
        f"{num_written / num_state:.4f} x the state: every byte is written once.",
        f"The plain rate went from {spread} MB/s.",
        "",
        "| Two ranks at once | s | MB/s | of the plain rate (target 80 %) | copy before it, ms |",
        "|---|---:|---:|---:|---:|",
        *(
            f"| {words} | {median[name]:.2f} | {rate[name]:,.0f} | {rate[name] / rate['plain']:.0%} | {copy} |"
            for words, (name, copy) in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--folder", default=None, help="a place on the disk to measure; by default that for temporary files"
    )
    given = parser.parse(SMOKE, globals())
    with tempfile.TemporaryDirectory() as meeting, tempfile.TemporaryDirectory(dir=given.folder) as root:
        multiprocessing.start_processes(rank_main, (meeting, root, given.rounds), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
