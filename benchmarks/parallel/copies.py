"""The share of communication that two slices of a micro-batch hide by taking turns, on two ranks with an emulated link.

The link is emulated: a message takes a time in proportion to its bytes during which no core works, one after another in
the order of their starts; gloo then carries it, uncounted. Its speed is chosen so that all messages of a step take a
part of the time that the step computes. Hidden is the part of that time in which a rank did not wait. Gradients are
compared with those of slices one after another, bit for bit. What a turn itself takes is measured by messages of no
time; it gives the size below which slices do not pay. There is no peer.

Run from the checkout: `python -m benchmarks.parallel.copies [--rounds 5]`; writes benchmarks/parallel/copies.md.
"""

import contextlib
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.command_line import CommandLine, write_result
from benchmarks.parallel.schedules import NextToken
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.micro_batches import SLICE_BYTES, run_micro_batches
from kitforge.core.parallel.parallelize import ParallelModel, parallelize
from kitforge.core.parallel.turns import Turns, communicate
from kitforge.core.parallel.world import World
from kitforge.foundation.device import describe
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.sharding import DECODER

TABLE = Path(__file__).with_suffix(".md")
RANKS, ROWS, STEPS, TURNS = 2, 8, 3, 2000
PARTS = (0.125, 0.25, 0.5)  # of the time that a step computes, for its messages
SHAPE: dict[str, Any] = {"vocab_size": 64, "dim": 256, "num_layers": 4, "num_heads": 8, "max_length": 256}
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, balance="none")
AXES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tensor": (LlamaConfig(mlp_dim=704, **SHAPE), {"tensor": RANKS}),
    "tensor sequence_parallel=false": (
        LlamaConfig(mlp_dim=704, **SHAPE),
        {"tensor": RANKS, "sequence_parallel": False},
    ),
    "expert": (MixtralConfig(mlp_dim=352, experts=EXPERTS, **SHAPE), {"data": RANKS, "expert": RANKS}),
}
SMALL: dict[str, Any] = {"vocab_size": 64, "dim": 32, "num_layers": 2, "num_heads": 4, "max_length": 32, "mlp_dim": 32}
SMOKE = {
    "AXES": {"tensor": (LlamaConfig(**SMALL), {"tensor": RANKS})},
    **{"STEPS": 1, "TURNS": 10, "PARTS": (0.5,), "rounds": 1},
}


class Link:
    """Messages that take a time each, one after another, and how long they were waited for."""

    def __init__(self) -> None:
        self.seconds_per_byte = self._free = 0.0
        self.reset()

    def reset(self) -> None:
        self.num_bytes, self.busy, self.exposed = 0, {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def operation(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*tensors: Any, async_op: bool = False, **options: Any) -> Any:
            size = max(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
            start = max(time.perf_counter(), self._free)
            self._free = due = start + size * self.seconds_per_byte
            self.num_bytes += size
            is_backward = torch._C._current_graph_task_id() != -1
            self.busy[is_backward] += due - start
            message = Message(self, real(*tensors, async_op=True, **options), due, is_backward)
            return message if async_op else message.wait()

        return operation


class Message:
    """A message that is there at a time."""

    def __init__(self, link: Link, work: dist.Work, due: float, is_backward: bool) -> None:
        self._link, self._work, self._due, self._is_backward = link, work, due, is_backward

    def wait(self) -> None:
        left = self._due - time.perf_counter()
        if left > 0:
            time.sleep(left)
            self._link.exposed[self._is_backward] += left
        self._work.wait()


def seconds_of_a_turn() -> float:
    """Of one message that takes no time, over those of two passes."""

    class Done:
        def wait(self) -> None:
            pass

    def one() -> None:
        for _ in range(TURNS):
            communicate(lambda _input, **_options: Done(), torch.zeros(1), group=cast(Any, None))

    started = time.perf_counter()
    Turns().run((one, one), torch.device("cpu"))
    return (time.perf_counter() - started) / TURNS / 2


def _step(parallel: ParallelModel, step: list[Any], takes_turns: bool) -> tuple[float, list[torch.Tensor]]:
    """Seconds and gradients."""
    weights = parallel.parameters().values()
    for each in weights:
        each.grad = None
    parallel.slices_pay = takes_turns
    dist.barrier()
    started = time.perf_counter()
    run_micro_batches(parallel, NextToken(), step, 1.0, contextlib.nullcontext)
    return time.perf_counter() - started, [each.grad for each in weights if each.grad is not None]


def _rank(rank: int, folder: str, axis: str, recompute: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    family, degrees = AXES[axis]
    world = World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(**degrees, copies=2), "cpu"))
    model = build_on_meta(family, "O1")
    model.recompute = recompute
    parallel = parallelize(model, DECODER, world)
    parallel.materialize(world.device)
    weights = parallel.parameters()
    init_weights(weights.items(), family.num_layers, 0, {each: parallel.region(each) for each in weights})
    model.train()
    link = Link()
    cast(Any, collectives).communicate = lambda operation, *tensors, **options: communicate(
        link.operation(operation), *tensors, **options
    )
    rows = torch.randint(0, 64, (2, ROWS // 2, family.max_length), generator=torch.Generator().manual_seed(rank))
    step = [{"tokens": each} for each in (rows if axis == "expert" else rows[:1].expand_as(rows))]
    wanted = [each.clone() for each in _step(parallel, step, takes_turns=False)[1]]
    link.reset()
    computes = statistics.median(_step(parallel, step, takes_turns=False)[0] for _ in range(STEPS))
    sizes = torch.tensor([computes, link.num_bytes / STEPS], dtype=torch.float64)
    computes, num_bytes = collectives.all_reduce_(sizes, world.mesh.world).tolist()  # type: ignore[union-attr]
    found = dict[str, dict[str, Any]]()
    for part in PARTS:
        link.seconds_per_byte = part * computes / num_bytes
        one = statistics.median(_step(parallel, step, takes_turns=False)[0] for _ in range(STEPS))
        link.reset()
        turns = [_step(parallel, step, takes_turns=True) for _ in range(STEPS)]
        is_same = all(map(torch.equal, turns[-1][1], wanted))
        hidden = [1 - link.exposed[is_backward] / link.busy[is_backward] for is_backward in (False, True)]
        two = statistics.median(seconds for seconds, _ in turns)
        found[str(part)] = {"computes": computes / RANKS, "one": one, "two": two, "hidden": hidden, "is_same": is_same}
        link.seconds_per_byte = 0.0
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(axis: str, recompute: str) -> list[Any]:
    """What each rank found."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(_rank, (folder, axis, recompute), nprocs=RANKS, start_method="fork")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(RANKS)]


def render(found: dict[tuple[str, str], list[list[Any]]], turns: list[float]) -> str:
    rounds = len(turns)
    lines = [
        "# Two slices that take turns",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu')).split(',')[0]}, 2 virtual cores, one thread a rank, "
        f"Python {platform.python_version()}, torch {torch.__version__}; {RANKS} ranks, {ROWS} rows of "
        f"{SHAPE['max_length']} tokens, {SHAPE['num_layers']} blocks of {SHAPE['dim']}; **emulated link**, whose speed "
        f"makes the messages of a step take a part of what it computes; median of {rounds} rounds.",
        "",
        "| axis | recomputation | link / computing | hidden, forward | hidden, backward | step without a link | slices "
        "one after another | slices in turns | bits equal |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for (axis, recompute), launches in found.items():
        for part in map(str, PARTS):
            ranks = [rank[part] for launch in launches for rank in launch]
            shares = [statistics.median(each["hidden"][way] for each in ranks) for way in range(2)]
            times = [1e3 * statistics.median(each[name] for each in ranks) for name in ("computes", "one", "two")]
            is_same = "yes" if all(each["is_same"] for each in ranks) else "NO"
            numbers = f"{shares[0]:.0%} | {shares[1]:.0%} | " + " | ".join(f"{each:.0f} ms" for each in times)
            lines.append(f"| `{axis}` | {recompute} | {float(part):.0%} | {numbers} | {is_same} |")
    turn = statistics.median(turns)
    lines += [
        "",
        "With `sequence_parallel` a block sends messages before and behind attention and MLP each; between two of them "
        "there is a norm alone, which hides little. A turn takes "
        f"{1e6 * turn:.0f} us, in which a link of {SLICE_BYTES / turn / 1e9:.1f} GB/s carries {SLICE_BYTES // 1024} "
        "KiB. Slices whose largest message is smaller run one after another.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse(SMOKE, globals())
    found: dict[tuple[str, str], list[list[Any]]] = {}
    turns = [seconds_of_a_turn() for _ in range(arguments.rounds)]
    for _ in range(arguments.rounds):
        for axis in AXES:
            for recompute in ("none", "selective"):
                found.setdefault((axis, recompute), []).append(launch(axis, recompute))
    print(render(found, turns))
    write_result(TABLE, render(found, turns))


if __name__ == "__main__":
    main()
