"""The optimizer on the host: bytes a parameter that stay on the device, counted in a run, and the time of a step.

Parameters are the matrices of the blocks. Counted are their weights, the gradients that are there at once, at most, and
moments that are on the device. Here device and host are both the CPU, so a copy is a real one but crosses no link, and
the update beside the forward pass shares the cores with it: times say what the way through the host costs, not what it
costs on a GPU.

Run from the checkout: `python -m benchmarks.parallel.host_optimizer [--steps 5]`. The result is in
benchmarks/parallel/host_optimizer.md.
"""

import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.nn.context import Context
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.linear import Linear
from kitforge.core.optim.build import OptimizerConfig, build_optimizer
from kitforge.core.optim.groups import decay_groups
from kitforge.core.parallel.offload import HostOptimizer
from kitforge.core.parallel.parallelize import parallelize
from kitforge.core.parallel.sharding import Sharding
from kitforge.core.parallel.world import ALONE
from kitforge.foundation.device import describe
from kitforge.foundation.dtype import DTYPES, Precision
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.loading import build_on_meta
from kitforge.trainer.precision import autocast

TABLE = Path(__file__).with_suffix(".md")
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "dim": 512,
    "num_layers": 6,
    "num_heads": 8,
    "mlp_dim": 1536,
    "max_length": 256,
}
ROWS = 2
SMOKE = {"SIZES": SIZES | {"dim": 32, "num_layers": 2, "mlp_dim": 64}, "steps": 2}
CASES: list[tuple[str, Precision]] = [
    ("none", "fp32"),
    ("optimizer", "fp32"),
    ("optimizer_and_gradients", "fp32"),
    ("none", "bf16"),
    ("optimizer", "bf16"),
    ("optimizer_and_gradients", "bf16"),
]


def measured(mode: str, precision: Precision, num_steps: int) -> tuple[float, float, float]:
    """Bytes a parameter on the device but for gradients, bytes a parameter of the gradients that are there at once, and
    seconds of the fastest step."""
    config = LlamaConfig(**SIZES)
    model = build_on_meta(config)
    parallel = parallelize(model, Sharding(), ALONE)
    parallel.materialize(ALONE.device)
    init_weights(parallel.parameters().items(), config.num_layers, 0)
    matrices = {f"{name}.weight": each for name, each in model.named_modules() if isinstance(each, Linear)}
    weights = {name: each.weight for name, each in matrices.items() if "blocks." in name}
    arrived: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def count(parameter: Tensor) -> None:
        """Runs before a gradient leaves. Those on their way to the host are there until they have been copied."""
        assert parameter.grad is not None
        arrived.append(weakref.ref(parameter.grad))
        alive.append(sum(each.nbytes for ref in arrived if (each := ref()) is not None))

    for parameter in weights.values():
        parameter.register_post_accumulate_grad_hook(count)
    optimizer = optimizer_of(mode, precision, parallel, model)
    optimizer.init_state()
    tokens = torch.randint(0, config.vocab_size, (ROWS, config.max_length), generator=torch.Generator().manual_seed(0))
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        with autocast(ALONE.device, precision):
            hidden = model.hidden(tokens, Context()).flatten(0, 1)
            loss = model.kernels.linear_cross_entropy(hidden, model.head_weight, tokens.roll(-1, 1).flatten())
        (loss / tokens.numel()).backward()
        norm = float(parallel.grad_norm())
        parallel.scale_gradients(min(1.0, 0.1 / norm))
        optimizer.step(1.0)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    parallel.wait()
    number = sum(each.numel() for each in weights.values())
    at_rest = sum(each.nbytes for each in weights.values())
    if mode == "none":
        at_rest += sum(each.nbytes for name, each in optimizer.tensors() if name.rpartition(".")[0] in weights)
    parallel.onload()
    return at_rest / number, max(alive) / number, min(seconds[1:])


def optimizer_of(mode: str, precision: Precision, parallel: Any, model: nn.Module) -> Any:
    config = OptimizerConfig()
    groups = decay_groups(model.named_parameters(), weight_decay=0.1)
    if mode == "none":
        return build_optimizer(parallel.local_groups(groups), config)
    offload = parallel.offload(
        [name for group in groups for name in group.names],
        gradients=mode == "optimizer_and_gradients",
        fraction=1.0,
        compute_dtype=DTYPES[precision],
    )
    return HostOptimizer(parallel.local_groups(groups), config, offload)


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse(SMOKE, globals())
    lines = [
        "# The optimizer on the host",
        "",
        f"{describe(ALONE.device)}. Bytes for each parameter of a matrix of a block; written by",
        "`python -m benchmarks.parallel.host_optimizer`.",
        "",
        "| trainer.offload | precision | weights and moments on the device | gradients there at once, at most | step |",
        "|---|---|---|---|---|",
    ]
    for mode, precision in CASES:
        at_rest, gradients, seconds = measured(mode, precision, options.steps)
        lines.append(f"| {mode} | {precision} | {at_rest:.2f} B | {gradients:.2f} B | {seconds * 1e3:.0f} ms |")
    text = "\n".join(lines) + "\n"
    write_result(TABLE, text)
    print(text, end="")


if __name__ == "__main__":
    main()
