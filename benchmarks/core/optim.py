"""Time of one optimizer step, and of the gradient norm, on the parameter shapes of a LLaMA of 8 layers x 512.

Run from the checkout: `python -m benchmarks.core.optim`. It writes its table to benchmarks/core/optim.md.
Every contestant gets the same parameters and gradients; rounds are interleaved and the median of them is shown.
"""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.optim.build import OptimizerConfig, build_optimizer
from kitforge.core.optim.grad_norm import global_norm
from kitforge.core.optim.groups import decay_groups
from kitforge.core.optim.muon import Muon
from kitforge.foundation.device import describe, pick, synchronize

LAYERS, DIM, HIDDEN, VOCABULARY = 8, 512, 1376, 8192
TABLE = Path(__file__).with_suffix(".md")
SMOKE = {"LAYERS": 1, "DIM": 16, "HIDDEN": 32, "VOCABULARY": 64, "rounds": 1}


def shapes() -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, DIM), "head": (VOCABULARY, DIM), "norm": (DIM,)}
    for layer in range(LAYERS):
        named |= {f"{layer}.{part}": (DIM, DIM) for part in ("query", "key", "value", "output")}
        named |= {f"{layer}.gate": (HIDDEN, DIM), f"{layer}.up": (HIDDEN, DIM), f"{layer}.down": (DIM, HIDDEN)}
        named |= {f"{layer}.norm_attention": (DIM,), f"{layer}.norm_mlp": (DIM,)}
    return named


def parameters(device: torch.device) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    named = {}
    for name, shape in shapes().items():
        named[name] = nn.Parameter(torch.randn(shape, generator=generator).to(device))
        named[name].grad = torch.randn(shape, generator=generator).to(device)
    return named


def matrices_of(named: dict[str, nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for name, parameter in named.items() if parameter.ndim == 2 and name not in ("embedding", "head")]


def whole_model_steps(named: dict[str, nn.Parameter]) -> dict[str, Callable[[], object]]:
    groups = decay_groups(named.items(), weight_decay=0.1, no_decay=["embedding"], heads=["head"])
    adamw = build_optimizer(groups, OptimizerConfig(name="adamw"))
    muon = build_optimizer(groups, OptimizerConfig(name="muon"))
    return {
        "AdamW, torch, for-loop": torch.optim.AdamW(named.values(), foreach=False).step,
        "AdamW, torch, foreach": torch.optim.AdamW(named.values(), foreach=True).step,
        "AdamW, ours (torch's fused)": lambda: adamw.step(1.0),
        "Muon for matrices and fused AdamW for the rest, ours": lambda: muon.step(1.0),
    }


def matrix_steps(named: dict[str, nn.Parameter]) -> dict[str, Callable[[], object]]:
    matrices = matrices_of(named)
    return {
        "Muon, ours": Muon(matrices, lr=1e-3).step,
        "Muon, torch (always in bf16)": torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw").step,
    }


def norms(named: dict[str, nn.Parameter]) -> dict[str, Callable[[], Tensor]]:
    gradients = gradients_of(named)
    return {
        "global_norm, ours": lambda: global_norm(gradients),
        "torch.nn.utils.get_total_norm": lambda: torch.nn.utils.get_total_norm(gradients),
        "torch._foreach_norm": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))),
        "vector_norm of each": lambda: torch.stack([torch.linalg.vector_norm(each) for each in gradients]).norm(),
    }


def gradients_of(named: dict[str, nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in named.values() if parameter.grad is not None]


def medians(contestants: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of each, one call of everyone a round; the first round only warms up."""
    times: dict[str, list[float]] = {title: [] for title in contestants}
    for _ in range(rounds + 1):
        for title, call in contestants.items():
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            times[title].append(1000 * (time.perf_counter() - start))
    return {title: statistics.median(values[1:]) for title, values in times.items()}


def table(rounds: int, date: str, device: torch.device) -> str:
    named = parameters(device)
    count = sum(parameter.numel() for parameter in named.values())
    hidden = sum(matrix.numel() for matrix in matrices_of(named))
    lines = [
        "# Optimizer steps and the gradient norm",
        "",
        f"{date}, {describe(device)}, torch {torch.__version__}, fp32; median of {rounds} interleaved rounds.",
        f"LLaMA shapes: {LAYERS} layers x {DIM}, hidden {HIDDEN}, vocabulary {VOCABULARY}, untied head:",
        f"{count / 1e6:.1f}M parameters, {hidden / 1e6:.1f}M of them in hidden matrices.",
        f"Load average when it began: {os.getloadavg()[0]:.1f}; above the number of threads, times are upper bounds.",
    ]
    for title, contestants in (
        ("One step of the whole model", whole_model_steps(named)),
        ("One step of the hidden matrices alone", matrix_steps(named)),
    ):
        lines += ["", f"| {title} | ms |", "|---|---|"]
        lines += [f"| {name} | {value:.1f} |" for name, value in medians(contestants, rounds, device).items()]
    exact = torch.stack([gradient.double().square().sum() for gradient in gradients_of(named)]).sum().sqrt()
    lines += ["", "| Norm of all gradients | ms | relative error |", "|---|---|---|"]
    measured = norms(named)
    for name, value in medians(dict(measured), 10 * rounds, device).items():
        lines.append(f"| {name} | {value:.2f} | {abs(float(measured[name]().double() / exact) - 1):.1e} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse(SMOKE, globals())
    text = table(arguments.rounds, arguments.date, pick(arguments.device))
    write_result(TABLE, text)
    print(text)


if __name__ == "__main__":
    main()
