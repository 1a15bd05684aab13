"""The orders of passes of a pipeline on two ranks: what they run, how long they wait, and the time of a step.

Each rank notes its passes, which are to be those of the schedule, and the part of a step in which its thread does not
run. Beside it is the waiting that `idle_fraction` counts, where all stages take the same time and messages none. There
is no peer and no bar.

Run from the checkout: `python -m benchmarks.parallel.schedules [--rounds 5]`. Every round launches each schedule once
in fresh ranks; medians over the rounds are in benchmarks/parallel/schedules.md.
"""

import contextlib
import datetime
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.nn.context import Context
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import Losses, run_micro_batches
from kitforge.core.parallel.parallelize import ParallelModel, parallelize
from kitforge.core.parallel.schedules import Pass, idle_fraction
from kitforge.core.parallel.world import World
from kitforge.foundation.device import describe
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.sharding import DECODER

TABLE = Path(__file__).with_suffix(".md")
STEPS, WARMUP, COUNT = 8, 2, 8
# A vocabulary so small that the head costs little beside a stage.
CONFIG = LlamaConfig(vocab_size=64, dim=256, num_layers=8, num_heads=4, mlp_dim=768, max_length=256)
SCHEDULES: dict[str, dict[str, Any]] = {
    "one process": {},
    "1f1b": {"pipeline": 2},
    "interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "zero_bubble": {"pipeline": 2, "schedule": "zero_bubble"},
    "zero_bubble_v": {"pipeline": 2, "schedule": "zero_bubble_v"},
}
SMOKE = {
    "CONFIG": LlamaConfig(vocab_size=64, dim=32, num_layers=4, num_heads=4, mlp_dim=64, max_length=64),
    **{"STEPS": 1, "WARMUP": 0, "COUNT": 3, "rounds": 1},
}


class NextToken(Losses):
    """The cross-entropies of rows of tokens."""

    def inputs(self, micro_batch: MicroBatch) -> tuple[Tensor, Context]:
        return micro_batch["tokens"], Context()

    def loss_of(self, model: nn.Module, hidden: Tensor, micro_batch: MicroBatch) -> Sums:
        network: Any = model
        targets = micro_batch["tokens"].roll(-1, 1).flatten()
        loss = network.kernels.linear_cross_entropy(hidden.flatten(0, 1), network.head_weight, targets)
        return Sums(loss=loss)


def noted(parallel: ParallelModel) -> list[tuple[str, int]]:
    """The passes that the stages of a rank run from now on."""
    passes = list[tuple[str, int]]()
    stages: Any = next(iter(parallel.relays.values())).stages
    forward, backward, queue = stages.forward, stages.backward, parallel.weight_gradients

    def first(stage: int, *more: Any) -> Any:
        passes.append(("F", stage))
        return forward(stage, *more)

    def second(flight: Any, *more: Any) -> None:
        passes.append(("B" if queue is None else "I", flight.stage))
        backward(flight, *more)

    stages.forward, stages.backward = first, second
    if queue is not None:
        run, own = queue.run, cast(Any, queue)

        def third(stage: int, micro_batch: int) -> None:
            passes.append(("W", stage))
            run(stage, micro_batch)

        own.run = third
    return passes


def _rank(rank: int, ranks: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    degrees = ParallelConfig(**SCHEDULES[name])
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu") if ranks > 1 else None)
    model = build_on_meta(CONFIG, "O1")
    parallel = parallelize(model, DECODER, world)
    parallel.materialize(world.device)
    weights = parallel.parameters()
    init_weights(weights.items(), CONFIG.num_layers, 0, {each: parallel.region(each) for each in weights})
    passes = noted(parallel) if ranks > 1 else []
    rows = torch.randint(
        0, CONFIG.vocab_size, (COUNT, 1, CONFIG.max_length), generator=torch.Generator().manual_seed(0)
    )
    step, times = [{"tokens": each} for each in rows], list[float]()
    for number in range(WARMUP + STEPS):
        if number == WARMUP:
            passes.clear()
            running = time.thread_time()
        started = time.perf_counter()
        run_micro_batches(parallel, NextToken(), step, 1.0, contextlib.nullcontext)
        times.append(time.perf_counter() - started)
        for each in weights.values():
            each.grad = None
    found = {"seconds": statistics.median(times[WARMUP:]), "waits": 0.0, "is_in_order": True}
    if ranks > 1:
        found["waits"] = 1 - (time.thread_time() - running) / sum(times[WARMUP:])
        found["is_in_order"] = passes == [each[:2] for each in degrees.stages.passes(rank, COUNT)] * STEPS
    Path(folder, str(rank)).write_text(json.dumps(found))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def launch(name: str) -> list[dict[str, float]]:
    """What each rank found."""
    ranks = ParallelConfig(**SCHEDULES[name]).world_size
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, (ranks, folder, name), nprocs=ranks, start_method="fork")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]


def told(order: list[Pass]) -> str:
    """The passes of a rank, such as `F0.1` of micro-batch 1 through stage 0."""
    return " ".join(f"{each.kind}{each.stage}.{each.micro_batch}" for each in order)


def render(found: dict[str, list[list[dict[str, float]]]]) -> str:
    rounds = len(next(iter(found.values())))
    lines = [
        "# The orders of passes of a pipeline",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu')).split(',')[0]}, 2 virtual cores, one thread a rank, "
        f"Python {platform.python_version()}, torch {torch.__version__}; gloo; 2 ranks, {COUNT} micro-batches of "
        f"{CONFIG.max_length} tokens, {CONFIG.num_layers} blocks of {CONFIG.dim}; median of {rounds} rounds.",
        "",
        "| | ms a step | runs its order | waits, counted | waits, measured |",
        "|---|---:|---|---:|---:|",
    ]
    for name, launches in found.items():
        milliseconds = 1e3 * statistics.median(max(each["seconds"] for each in ranks) for ranks in launches)
        if name == "one process":
            lines.append(f"| {name} | {milliseconds:.0f} | | | |")
            continue
        counted = idle_fraction(ParallelConfig(**SCHEDULES[name]).stages, COUNT)
        measured = statistics.median(statistics.mean(each["waits"] for each in ranks) for ranks in launches)
        is_in_order = all(each["is_in_order"] for ranks in launches for each in ranks)
        answer = "yes" if is_in_order else "NO"
        lines.append(f"| `{name}` | {milliseconds:.0f} | {answer} | {counted:.1%} | {measured:.1%} |")
    for name in list(found)[1:]:
        pipeline = ParallelConfig(**SCHEDULES[name]).stages
        lines += ["", f"`{name}`, 3 micro-batches:", "", "```"]
        lines += [f"rank {rank}  {told(pipeline.passes(rank, 3))}" for rank in range(2)] + ["```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse(SMOKE, globals())
    found: dict[str, list[list[dict[str, float]]]] = {}
    for _ in range(arguments.rounds):
        for name in SCHEDULES:
            found.setdefault(name, []).append(launch(name))
    print(render(found))
    write_result(TABLE, render(found))


if __name__ == "__main__":
    main()
