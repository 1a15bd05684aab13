"""What an axis costs: a training step of ours at two ranks beside torch's own way of doing the same.

- tensor: our tensor axis beside `parallelize_module` with sequence parallel, on the same small decoder, where the step
  is nearly all overhead; and both beside one process that has no axis.
- data: our summed buckets beside DistributedDataParallel.
- zero3: our use of `fully_shard` beside a plain one.

Run from the checkout: `python -m benchmarks.parallel.steps [--rounds 5]`. Every round launches each contestant once in
fresh ranks; the median over the rounds of each launch's fastest step is shown, in benchmarks/parallel/steps.md.
"""

import datetime
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.nn.context import Context
from kitforge.core.nn.init import init_weights
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.world import World
from kitforge.foundation.device import describe
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build, build_on_meta
from kitforge.models.sharding import DECODER

TABLE = Path(__file__).with_suffix(".md")
STEPS, WARMUP = 20, 4
Step = Callable[[], object]

# Small enough that a step is nearly all overhead; large enough that it is nearly all arithmetic and traffic.
SMALL = LlamaConfig(vocab_size=64, dim=32, num_layers=3, num_heads=4, mlp_dim=128, max_length=64)
LARGE = LlamaConfig(vocab_size=4096, dim=256, num_layers=4, num_heads=4, mlp_dim=768, max_length=256)


def data(config: LlamaConfig, rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    return tokens, tokens.roll(-1, 1)


def ours(config: LlamaConfig, degrees: ParallelConfig, rows: int, length: int) -> Step:
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu") if degrees.world_size > 1 else None)
    model = build_on_meta(config)
    parallel = parallelize(model, DECODER, world)
    parallel.materialize(world.device)
    pieces = parallel.parameters()
    init_weights(pieces.items(), config.num_layers, 0, {name: parallel.region(name) for name in pieces})
    tokens, targets = data(config, rows, length)

    def step() -> None:
        parallel.micro_batch(is_last=True)
        hidden = model.hidden(tokens, Context()).flatten(0, 1)
        model.kernels.linear_cross_entropy(hidden, model.head_weight, targets.flatten()).backward()
        parallel.reduce_gradients()
        for piece in pieces.values():
            piece.grad = None

    return step


class Block(nn.Module):
    """The same block in plain torch, as the tutorials of torch write it."""

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)
        self.attend = Attend()

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.mix(self.attention_norm(stream))
        return stream + self.feed(self.mlp_norm(stream))

    def mix(self, input: Tensor) -> Tensor:
        return self.out(self.attend(self.query(input), self.key(input), self.value(input), self.head_dim))

    def feed(self, input: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(input)) * self.up(input))


class Attend(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> Tensor:
        query, key, value = (each.unflatten(-1, (-1, head_dim)).transpose(1, 2) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2)


class Plain(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(config.dim, config.num_heads, config.mlp_dim) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        return self.output(self.norm(stream))


def parallelised(config: LlamaConfig, rows: int, length: int) -> Step:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Plain(config)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for block in model.blocks:
        columns = {"query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel()}
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(use_local_output=True),
                "mlp_norm": SequenceParallel(use_local_output=True),
                **{name: ColwiseParallel(input_layouts=Shard(1)) for name in (*columns, "gate", "up")},
                "out": RowwiseParallel(output_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    tokens, targets = data(config, rows, length)

    def step() -> None:
        with loss_parallel():
            logits = model(tokens).flatten(0, 1)
            functional.cross_entropy(logits, targets.flatten(), reduction="mean").backward()
        model.zero_grad(set_to_none=True)

    return step


class WithLoss(nn.Module):
    """Our own network with its loss inside, as DistributedDataParallel wants to be called."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.network = build(config, device=torch.device("cpu"), seed=0)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.network.hidden(tokens, Context()).flatten(0, 1)
        return self.network.kernels.linear_cross_entropy(hidden, self.network.head_weight, targets.flatten())


def distributed(config: LlamaConfig, rows: int, length: int) -> Step:
    """DistributedDataParallel around our own network, so that the two differ by what is around it alone."""
    model = DistributedDataParallel(WithLoss(config))
    tokens, targets = data(config, rows, length)

    def step() -> None:
        model(tokens, targets).backward()
        model.zero_grad(set_to_none=True)

    return step


def sharded(config: LlamaConfig, rows: int, length: int) -> Step:
    """fully_shard around our own network, so that the two differ by what is around them alone."""
    model = build_on_meta(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "hidden")
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        nn.init.normal_(parameter.to_local(), std=0.02)
    tokens, targets = data(config, rows, length)

    def step() -> None:
        hidden = model.hidden(tokens, Context()).flatten(0, 1)
        model.kernels.linear_cross_entropy(hidden, model.head_weight, targets.flatten()).backward()
        model.zero_grad(set_to_none=True)

    return step


# Name, ranks, what makes the step.
CONTESTANTS: dict[str, tuple[int, Callable[[], Step]]] = {
    "tensor: one process": (1, lambda: ours(SMALL, ParallelConfig(), 4, 16)),
    "tensor: ours, 2 ranks": (2, lambda: ours(SMALL, ParallelConfig(tensor=2), 4, 16)),
    "tensor: parallelize_module, 2 ranks": (2, lambda: parallelised(SMALL, 4, 16)),
    "data: ours, 2 ranks": (2, lambda: ours(LARGE, ParallelConfig(data=2), 4, 128)),
    "data: DistributedDataParallel, 2 ranks": (2, lambda: distributed(LARGE, 4, 128)),
    "zero3: ours, 2 ranks": (2, lambda: ours(LARGE, ParallelConfig(shard=2), 4, 128)),
    "zero3: fully_shard, 2 ranks": (2, lambda: sharded(LARGE, 4, 128)),
}
SMOKE = {
    "CONTESTANTS": {name: made for name, made in CONTESTANTS.items() if "ours" in name or "one process" in name},
    **{"LARGE": SMALL, "STEPS": 1, "WARMUP": 1, "rounds": 1},
}
PAIRS = [
    ("tensor: ours, 2 ranks", "tensor: parallelize_module, 2 ranks"),
    ("data: ours, 2 ranks", "data: DistributedDataParallel, 2 ranks"),
    ("zero3: ours, 2 ranks", "zero3: fully_shard, 2 ranks"),
]


def _rank(rank: int, ranks: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    if ranks > 1:
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    step = CONTESTANTS[name][1]()
    times = []
    for _ in range(WARMUP + STEPS):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    if rank == 0:
        Path(folder, "seconds").write_text(repr(statistics.median(times[WARMUP:])))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def launch(name: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        ranks = CONTESTANTS[name][0]
        multiprocessing.start_processes(_rank, (ranks, folder, name), nprocs=ranks, start_method="fork")
        return float(Path(folder, "seconds").read_text())


def render(times: dict[str, list[float]]) -> str:
    medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    rounds = len(next(iter(times.values())))
    lines = [
        "# A step along each axis",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu')).split(',')[0]}, 2 virtual cores, one thread a rank, "
        f"Python {platform.python_version()}, torch {torch.__version__}; gloo; median of {rounds} interleaved rounds.",
        "",
        "| contestant | ms a step |",
        "|---|---:|",
        *(f"| {name} | {value:.1f} |" for name, value in medians.items()),
        "",
        "| pair | ratio of times, peer / ours |",
        "|---|---:|",
    ]
    floor = medians["tensor: one process"]
    pairs = [(mine, peer) for mine, peer in PAIRS if peer in medians]
    for mine, peer in pairs:
        lines.append(f"| {mine.split(',')[0]} / {peer.split(': ')[1]} | {medians[peer] / medians[mine]:.2f} |")
    if pairs:
        own, theirs = (medians[name] - floor / 2 for name in pairs[0])
        cost = f"the tensor axis costs {theirs / own:.2f}x less than the peer's"
        lines += ["", f"Beyond half of one process's step, {cost}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    arguments = parser.parse(SMOKE, globals())
    times: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for name in CONTESTANTS:
            if name.startswith(arguments.only):
                times.setdefault(name, []).append(launch(name))
                print(f"{name}: {times[name][-1] * 1e3:.1f} ms")
    if not arguments.only:
        print(render(times))
        write_result(TABLE, render(times))


if __name__ == "__main__":
    main()
