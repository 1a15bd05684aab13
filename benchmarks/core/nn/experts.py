"""Mixture of experts on a CPU: the grouped product beside `F.grouped_mm` and one dense product, and a training step
beside `transformers` on the same weights.

    python -m benchmarks.core.nn.experts                   # writes experts.md
    python -m benchmarks.core.nn.experts --pairs 9 --threads 2

Each figure is the median of pairs in which the contestants take turns; a step is forward, loss and backward.
"""

import argparse
import datetime
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.command_line import CommandLine, is_smoke, write_result
from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.foundation.device import describe
from kitforge.models import loading
from kitforge.models.mixtral.model import MixtralConfig

PRODUCTS = [(8, 4096), (8, 512), (64, 4096)]  # experts and rows
DIM, HIDDEN = 256, 512
STEP: dict[str, Any] = {
    "dim": 256,
    "num_layers": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "mlp_dim": 512,
    "vocab_size": 4096,
}
BATCH, LENGTH, EXPERTS, TOP_K = 8, 256, 8, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMOKE = {
    "PRODUCTS": [(2, 8)],
    "DIM": 16,
    "HIDDEN": 16,
    "STEP": {"dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "mlp_dim": 16, "vocab_size": 32},
    "BATCH": 1,
    "LENGTH": 4,
    "pairs": 1,
}


def medians(calls: Mapping[str, Callable[[], object]], pairs: int) -> dict[str, float]:
    """Milliseconds of each call, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(pairs + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if number:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(each) for name, each in times.items()}


def products(pairs: int) -> list[str]:
    lines = ["| experts | rows | dtype | ours | `F.grouped_mm` | | one dense | |"]
    lines.append("|---:|---:|---|---:|---:|---:|---:|---:|")
    for num_experts, rows in PRODUCTS:
        for name, dtype in DTYPES.items():
            input = torch.randn(rows, DIM, dtype=dtype, requires_grad=True)
            weight = torch.randn(num_experts, HIDDEN, DIM, dtype=dtype, requires_grad=True)
            ends = torch.arange(1, num_experts + 1, dtype=torch.int32) * (rows // num_experts)
            grad = torch.randn(rows, HIDDEN, dtype=dtype)
            found = medians(product_calls(input, weight, ends, grad), pairs)
            ours, torchs, dense = found.values()
            lines.append(
                f"| {num_experts} | {rows} | {name} | {ours:.2f} | {torchs:.2f} | {ours / torchs:.2f} | {dense:.2f} "
                f"| {ours / dense:.2f} |"
            )
    return lines


def product_calls(input: Tensor, weight: Tensor, ends: Tensor, grad: Tensor) -> dict[str, Callable[[], object]]:
    """Forward and backward of the three."""
    kernel, leaves = select("O1").grouped_linear, [input, weight]
    one = weight[0].detach().clone().requires_grad_()
    return {
        "ours": lambda: torch.autograd.grad(kernel(input, weight, ends), leaves, grad),
        "torch": lambda: torch.autograd.grad(functional.grouped_mm(input, weight.mT, offs=ends), leaves, grad),
        "dense": lambda: torch.autograd.grad(functional.linear(input, one), [input, one], grad),
    }


def step_of(model: nn.Module, dtype: torch.dtype, tokens: Tensor, hidden_of: Callable[[Tensor], Tensor]) -> float:
    """The loss of a step, with its gradients in the parameters."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        loss = hidden_of(tokens)
    loss.backward()
    return float(loss.detach())


def steps(pairs: int) -> list[str]:
    config = MixtralConfig(**STEP, experts=ExpertsConfig(num_experts=EXPERTS, top_k=TOP_K, balance="none"))
    model = loading.build(config, device=torch.device("cpu"), seed=0)
    tokens = torch.randint(0, STEP["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1).flatten()

    def ours(tokens: Tensor) -> Tensor:
        hidden = model.hidden(tokens).flatten(0, 1)
        loss: Tensor = model.kernels.linear_cross_entropy(hidden, model.head_weight, targets) / targets.numel()
        return loss

    calls: dict[str, Callable[[], float]] = {
        f"ours {name}": partial(step_of, model, dtype, tokens, ours) for name, dtype in DTYPES.items()
    }
    if not is_smoke():
        peer = transformers_model(model)

        def theirs(tokens: Tensor) -> Tensor:
            loss: Tensor = functional.cross_entropy(peer(tokens).logits.flatten(0, 1).float(), targets)
            return loss

        calls |= {
            f"transformers {name}": partial(step_of, peer, dtype, tokens, theirs) for name, dtype in DTYPES.items()
        }
    losses = {name: call() for name, call in calls.items()}
    found = medians(calls, pairs)
    lines = ["| dtype | ours | `transformers` | | losses |", "|---|---:|---:|---:|---|"]
    for name in DTYPES:
        ours_ms, theirs_ms = found[f"ours {name}"], found.get(f"transformers {name}", float("nan"))
        both = f"{losses[f'ours {name}']:.5f}, {losses.get(f'transformers {name}', float('nan')):.5f}"
        lines.append(f"| {name} | {ours_ms:.0f} | {theirs_ms:.0f} | {theirs_ms / ours_ms:.2f}x | {both} |")
    told = ", ".join(f"{name} {kernel_share(call):.0%}" for name, call in calls.items())
    lines += ["", f"Of a step the matrix products and attention of torch, which both use, take: {told}."]
    return [*lines, "", *shares(model, pairs)]


def kernel_share(step: Callable[[], object]) -> float:
    """The share of a step's time that is in torch's matrix products and attention."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        step()
    spent = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    kernels = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product")
    return sum(each for name, each in spent.items() if name.startswith(kernels)) / sum(spent.values())


def transformers_model(model: Any) -> Any:
    """The same weights in `transformers`."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        loading.save(model, Path(folder))
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def shares(model: Any, pairs: int) -> list[str]:
    """What routing and moving rows take of the blocks' experts, forward and backward."""
    layer = model.blocks[0].mlp
    stream = torch.randn(BATCH, LENGTH, STEP["dim"], requires_grad=True)
    routing = layer.router(stream)

    def dispatch() -> None:
        found = layer.router(stream)
        permutation = permutation_of(found.choices.flatten(0, 1), EXPERTS)
        rows = model.kernels.moe_permute(stream.flatten(0, 1), permutation)
        model.kernels.moe_unpermute(rows, found.weights.flatten(0, 1), permutation).sum().backward()

    def whole() -> None:
        found = layer.router(stream)
        layer.experts(stream, found.choices, found.weights).sum().backward()

    found = medians({"dispatch": dispatch, "whole": whole}, pairs)
    share = found["dispatch"] / found["whole"]
    return [
        f"Routing and moving {routing.choices.numel()} rows of {STEP['dim']}: {found['dispatch']:.2f} ms of the "
        f"{found['whole']:.2f} ms of a mixture, {share:.0%}."
    ]


def parsed() -> argparse.Namespace:
    parser = CommandLine(__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse(SMOKE, globals())


def main() -> None:
    arguments = parsed()
    torch.set_num_threads(arguments.threads)
    about = f"{datetime.date.today()}, {describe(torch.device('cpu'))}, Python {platform.python_version()}"
    about += f", torch {torch.__version__}"
    load = f"load average at the start {os.getloadavg()[0]:.1f}"
    lines = [
        "# Mixture of experts on a CPU",
        "",
        f"{about}; {arguments.threads} threads; ms, medians of {arguments.pairs} pairs; {load}.",
        "",
        f"Forward and backward of a product with {HIDDEN} x {DIM} matrices, even routing:",
        "",
        *products(arguments.pairs),
        "",
        f"A training step over {BATCH} x {LENGTH} tokens: {STEP}, {EXPERTS} experts, top {TOP_K}:",
        "",
        *steps(arguments.pairs),
    ]
    print("\n".join(lines))
    write_result(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
