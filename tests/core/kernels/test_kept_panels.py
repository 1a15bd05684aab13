"""Panels of a weight that are packed once and read by later products: the bits of a product that packs for itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.kernels.comparison import random

numba = pytest.importorskip("kitforge.core.kernels.linear.numba")
# More words than are multiplied at once, outputs that fill no panel, features that fill no tile, and none that do.
SIZES = [(96, 64), (70, 4133), (33, 90), (5, 7)]


def product(rows: Tensor, weight: Tensor, kept: int, packs: bool) -> Tensor:
    """As the compiled step calls it, panel by panel."""
    from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL
    from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, HALF

    output = torch.full((len(rows), len(weight)), float("nan"))
    memory = torch.empty(numba.scratch_size(len(rows), weight.shape[1]) + numba.LINE, dtype=torch.uint8)
    like: Any = FLOAT if rows.dtype is torch.float32 else HALF
    addresses = rows.data_ptr(), weight.data_ptr(), 0, kept, packs
    for panel in range(-(-len(weight) // PANEL)):
        columns = output.data_ptr() + 4 * PANEL * panel, len(weight)
        numba.multiply(
            like, False, *addresses, columns, len(rows), *weight.shape, panel, panel + 1, _first_line(memory)
        )
    return output


def _first_line(memory: Tensor) -> int:
    return -(-memory.data_ptr() // int(numba.LINE)) * int(numba.LINE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kept_panels_change_no_bits_and_stay_within_their_size(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    weight, guard = random(*sizes, seed=1).to(dtype), 77
    size = numba.packed_size(weight)
    memory = torch.full((size + 2 * numba.LINE,), guard, dtype=torch.uint8)
    kept = _first_line(memory)
    end = kept - memory.data_ptr() + size
    for num_rows in (1, 4, 5, 7, 16, 70):
        rows = random(num_rows, sizes[1], seed=2).to(dtype)
        wanted = product(rows, weight, 0, True)
        assert torch.equal(product(rows, weight, kept, True), wanted)
        assert torch.equal(product(rows, weight, kept, False), wanted)
        assert bool((memory[end:] == guard).all())


def test_panels_are_read_until_a_product_packs_again() -> None:
    weight, rows = random(40, 64, seed=1).bfloat16(), random(3, 64, seed=2).bfloat16()
    memory = torch.empty(numba.packed_size(weight) + numba.LINE, dtype=torch.uint8)
    old = product(rows, weight, _first_line(memory), True)
    weight.neg_()
    assert torch.equal(product(rows, weight, _first_line(memory), False), old)
    assert torch.equal(product(rows, weight, _first_line(memory), True), -old)
