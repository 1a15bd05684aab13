"""What the masks of dropout cost: the counter-based draw, and torch's generator seeded row by row, which it took the
place of.

    python -m benchmarks.core.nn.dropout

Two samples of 12 heads over 1024 tokens, as the attention weights of a small GPT-2, and its stream [2, 1024, 768].
Milliseconds of processor time, the best of five.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.command_line import CommandLine
from kitforge.core.kernels.keep_mask import reference
from kitforge.core.nn.context import DropoutKey, dropout
from kitforge.foundation import seed

SHAPES = {"attention": (2, 12, 1024, 1024), "stream": (2, 1024, 768)}
KEY = DropoutKey(seed=0, step=0, samples=(0, 1))
CPU = torch.device("cpu")
RATE = 0.1
SMOKE = {"SHAPES": {"attention": (2, 1, 8, 8), "stream": (2, 8, 8)}}


def row_by_row(shape: torch.Size) -> Tensor:
    """A generator for each row, as before."""
    rows = [
        torch.rand(shape[1:], generator=seed.generator(0, "dropout", 0, "attention.0", row)) for row in range(shape[0])
    ]
    return (torch.stack(rows) >= RATE).float() / (1.0 - RATE)


def masked_row_by_row(input: Tensor) -> Tensor:
    return input * row_by_row(input.shape)


def milliseconds(work: Callable[[], object]) -> float:
    """Of processor time, the best of five after one that is not counted."""
    found = []
    for _ in range(6):
        begin = time.process_time()
        work()
        found.append((time.process_time() - begin) * 1e3)
    return min(found[1:])


def main() -> None:
    """Print the table."""
    CommandLine(__doc__).parse(SMOKE, globals())
    print("| | torch's generator, row by row | Philox, torch's operations | Philox, compiled |\n|---|---|---|---|")
    for name, sizes in SHAPES.items():
        shape = torch.Size(sizes)
        input = torch.randn(shape)
        rows, count = torch.arange(shape[0]), shape[1:].numel()
        before = milliseconds(partial(row_by_row, shape))
        slow = milliseconds(partial(reference.keep_mask, 1, rows, 0, count, RATE))
        fast = milliseconds(partial(KEY.mask, "attention.0", shape, RATE, CPU))
        print(f"| mask, {name} {sizes} | {before:.1f} | {slow:.1f} | {fast:.1f} |")
        applied = milliseconds(partial(masked_row_by_row, input))
        now = milliseconds(partial(dropout, input, RATE, "attention.0", KEY))
        print(f"| with its use, {name} | {applied:.1f} | | {now:.1f} |")


if __name__ == "__main__":
    main()
