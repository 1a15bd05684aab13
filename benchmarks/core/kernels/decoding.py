"""The loops of a decoding step beside torch's own operations: products of a few rows, and attention of single tokens.

    python -m benchmarks.core.kernels.decoding                       # writes decoding.md
    python -m benchmarks.core.kernels.decoding --threads 2 --table some.md

Weights and keys come from memory, as in a model that is larger than the caches. Each figure is the best of five rounds,
in which the contestants take turns.
"""

import datetime
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.command_line import CommandLine, write_result
from kitforge.core.kernels.decode_attention.numba import decode_attention
from kitforge.core.kernels.linear.numba import linear
from kitforge.foundation.device import describe

TABLE = Path(__file__).with_suffix(".md")
SHAPES = [(512, 512), (1376, 512), (8192, 512)]
ROWS = [1, 4, 8, 16, 32]
TEXTS = [(1, 64), (1, 512), (8, 100), (8, 512)]
HEADS, HEAD_DIM, ROOM = 8, 64, 512
# Numbers in the weights of one call, more than the caches hold.
WEIGHTS = 2**24
SMOKE = {"SHAPES": [(64, 32)], "ROWS": [1, 8], "TEXTS": [(2, 4)], "ROOM": 8, "WEIGHTS": 1}


def best(calls: list[Callable[[], object]], count: int) -> list[float]:
    """Microseconds of each call, of which `count` are made in one."""
    found = [float("inf")] * len(calls)
    for _ in range(5):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            call()
            found[place] = min(found[place], 1e6 * (time.perf_counter() - start) / count)
    return found


def product(weights: list[Tensor], num_rows: int) -> str:
    num_outputs, num_features = weights[0].shape
    halves = [weight.bfloat16() for weight in weights]
    input = torch.randn(num_rows, num_features)
    half = input.bfloat16()
    calls: list[Callable[[], object]] = [
        lambda: [linear(input, weight) for weight in weights],
        lambda: [functional.linear(input, weight) for weight in weights],
        lambda: [linear(half, weight) for weight in halves],
        lambda: [functional.linear(half, weight) for weight in halves],
    ]
    one, peer, two, other = best(calls, len(weights))
    head = f"| {num_outputs} x {num_features} | {num_rows} "
    return f"{head}| {one:.0f} | {peer:.0f} | {peer / one:.2f}x | {two:.0f} | {other:.0f} | {other / two:.2f}x |"


def products() -> list[str]:
    lines = ["| weight | rows | fp32 | torch | | bf16 | torch | |", "|---|---:|---:|---:|---:|---:|---:|---:|"]
    for shape in SHAPES:
        weights = [torch.randn(shape) * 0.02 for _ in range(max(2, WEIGHTS // (shape[0] * shape[1])))]
        lines += [product(weights, num_rows) for num_rows in ROWS]
    return lines


def attended(texts: int, length: int) -> str:
    shape = (texts * ROOM, HEADS, HEAD_DIM)
    layers = [(torch.randn(shape), torch.randn(shape)) for _ in range(16)]
    halves = [(keys.bfloat16(), values.bfloat16()) for keys, values in layers]
    query = torch.randn(texts, HEADS, HEAD_DIM)
    starts, lengths = torch.arange(texts) * ROOM, torch.full((texts,), length)

    def ours(slabs: list[tuple[Tensor, Tensor]]) -> None:
        for keys, values in slabs:
            decode_attention(query, keys, values, starts, lengths, window=None, scale=0.125)

    def torchs() -> None:
        for slabs in layers:
            keys, values = (slab.view(texts, ROOM, HEADS, HEAD_DIM)[:, :length].transpose(1, 2) for slab in slabs)
            functional.scaled_dot_product_attention(query.unsqueeze(2), keys, values, scale=0.125)

    one, peer, two = best([lambda: ours(layers), torchs, lambda: ours(halves)], len(layers))
    return f"| {texts} | {length} | {one:.0f} | {peer:.0f} | {peer / one:.2f}x | {two:.0f} |"


def attention() -> list[str]:
    lines = ["| texts | tokens each | fp32 | torch | | bf16 |", "|---:|---:|---:|---:|---:|---:|"]
    return lines + [attended(*each) for each in TEXTS]


@torch.no_grad()
def main() -> None:
    parser = CommandLine(__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", type=Path, default=TABLE)
    arguments = parser.parse(SMOKE, globals())
    torch.set_num_threads(arguments.threads)
    lines = [
        "# Loops of a decoding step",
        "",
        f"{datetime.date.today()}, {describe(torch.device('cpu'))}, Python {platform.python_version()}, torch "
        f"{torch.__version__}; microseconds; load average at the start {os.getloadavg()[0]:.1f}.",
        "",
        *products(),
        "",
        f"Attention of single tokens, {HEADS} heads x {HEAD_DIM}:",
        "",
        *attention(),
    ]
    print("\n".join(lines))
    write_result(arguments.table, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
