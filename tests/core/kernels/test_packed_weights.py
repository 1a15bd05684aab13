"""int8 and int4 in the compiled step: the product with the dequantized weight, whatever rows are beside a row."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.quantized_linear.reference import GROUP, dequantize, quantize
from tests.core.kernels.comparison import poison, random

numba = pytest.importorskip("kitforge.core.kernels.quantized_linear.numba")
DTYPES = [torch.float32, torch.bfloat16]
# Outputs that fill panels and that do not; more features than are multiplied at once.
SIZES = [(70, 64), (32, 96), (3, 4128)]


def product(
    rows: Tensor, weight: Tensor, bits: Literal[4, 8], bias: Tensor | None = None, has_tiles: bool = False
) -> Tensor:
    """As the step calls it, panel by panel."""
    from kitforge.core.kernels.linear.gemm_microkernel import PANEL
    from kitforge.core.kernels.linear.numba import LINE, scratch_size
    from kitforge.core.kernels.numba_runtime import FLOAT, HALF

    packed, output = numba.packed(weight, bits), torch.full((len(rows), len(weight)), float("nan"))
    memory = torch.empty(scratch_size(len(rows), weight.shape[1]) + LINE, dtype=torch.uint8)
    scratch = -(-memory.data_ptr() // LINE) * LINE
    like: Any = FLOAT if rows.dtype is torch.float32 else HALF
    addresses = rows.data_ptr(), packed.data_ptr(), 0 if bias is None else bias.data_ptr()
    for panel in range(-(-len(weight) // PANEL)):
        columns = output.data_ptr() + 4 * PANEL * panel, len(weight)
        numba.multiply_quantized(like, has_tiles, bits, *addresses, columns, len(rows), *weight.shape, panel, scratch)
    return output


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_product_with_the_dequantized_weight(
    sizes: tuple[int, int], bits: Literal[4, 8], dtype: torch.dtype
) -> None:
    # Neighbouring groups differ in size, so that a scale of another group shows.
    weight = (random(*sizes, seed=1) * (1 + torch.arange(sizes[1]) // GROUP % 5)).to(dtype)
    rows, bias = random(9, sizes[1], seed=2).to(dtype), random(sizes[0], seed=3).to(dtype)
    poison()
    found = product(rows, weight, bits, bias)
    exact = dequantize(*quantize(weight, bits, GROUP if bits == 4 else None)).double()
    wanted = rows.double() @ exact.t() + bias.double()
    # n sums, a scale and a bias, each rounded in fp32 (Higham, 2002, section 3.1); then the type of the rows.
    sums = (sizes[1] + sizes[1] // GROUP + 2) * 2**-24 * (rows.double().abs() @ exact.abs().t() + bias.abs())
    assert bool(((found - wanted).abs() <= sums + (2**-8 * wanted.abs() if dtype is torch.bfloat16 else 0)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(bits: Literal[4, 8], dtype: torch.dtype) -> None:
    weight, rows = random(70, 192, seed=1).to(dtype), random(70, 192, seed=2).to(dtype)
    many = product(rows, weight, bits)
    for first, count in ((0, 1), (5, 2), (1, 4), (7, 9), (2, 13), (6, 64)):
        assert torch.equal(product(rows[first : first + count].contiguous(), weight, bits), many[first : first + count])


def test_the_matrix_unit_multiplies_int8_to_the_rounding_of_its_sums() -> None:
    linear = pytest.importorskip("kitforge.core.kernels.linear.numba")
    if not linear.has_matrix_unit():
        pytest.skip("no matrix unit here")
    weight, rows = random(70, 4128, seed=1).bfloat16(), random(70, 4128, seed=2).bfloat16()
    many = product(rows, weight, 8, has_tiles=True)
    exact = dequantize(*quantize(weight, 8, None)).double()
    wanted, sums = rows.double() @ exact.t(), rows.double().abs() @ exact.abs().t()
    assert bool(((many - wanted).abs() <= (4128 + 2) * 2**-24 * sums + 2**-8 * wanted.abs()).all())
    for first, count in ((0, 1), (7, 9), (2, 33)):
        few = product(rows[first : first + count].contiguous(), weight, 8, has_tiles=True)
        assert torch.equal(few, many[first : first + count])
