"""Quantized weights in the compiled step: the product with the dequantized weight, whatever rows are beside a row."""

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.quantized_linear.reference import GROUP, Blocks, dequantize, quantize
from tests.core.kernels.comparison import poison, random
from tests.differential.drawn import WHOLE

numba = pytest.importorskip("kitforge.core.kernels.quantized_linear.numba")
linear = pytest.importorskip("kitforge.core.kernels.linear.numba")
# Bits, features of a scale, and its dtype. The last two are GGUF's Q8_0 and Q4_0.
KINDS: dict[str, tuple[Any, int | None, torch.dtype]] = {
    "int8": (8, None, torch.float32),
    "int4": (4, GROUP, torch.float32),
    "q8_0": (8, GROUP, torch.float16),
    "q4_0": (4, GROUP, torch.float16),
}
# Each is compiled by itself; in the gate every kind, every number of bits in every dtype of rows.
MULTIPLIED = [("int8", torch.float32), ("q4_0", torch.float32), ("int4", torch.bfloat16), ("q8_0", torch.bfloat16)]
if WHOLE:
    MULTIPLIED = [(kind, dtype) for kind in KINDS for dtype in (torch.float32, torch.bfloat16)]
kinds = pytest.mark.parametrize(("kind", "dtype"), MULTIPLIED)
# Outputs that fill panels and that do not; more features than are multiplied at once.
SIZES = [(70, 64), (32, 96), (5, 32), (3, 4128)]


@pytest.fixture(params=["vectors", "matrix unit"])
def has_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the matrix unit multiplies bfloat16, here and in `linear`."""
    wanted = request.param == "matrix unit"
    if wanted and not linear.has_matrix_unit():
        pytest.skip("no matrix unit here")
    monkeypatch.setattr(linear, "prefers_matrix_unit", lambda: wanted)
    return wanted


def blocks_of(sizes: tuple[int, int], kind: str) -> Blocks:
    """Neighbouring groups differ in size, so that a scale of another group shows."""
    bits, group, dtype = KINDS[kind]
    weight = random(*sizes, seed=1).float() * 2.0 ** (torch.arange(sizes[1]) // GROUP % 5)
    whole, scales = quantize(weight, bits, group)
    return Blocks(whole, scales.to(dtype))


def product(rows: Tensor, blocks: Blocks, has_tiles: bool, bias: Tensor | None = None) -> Tensor:
    """As the step calls it, panel by panel."""
    from kitforge.core.kernels.cpu_engine.gemm_microkernel import PANEL
    from kitforge.core.kernels.cpu_engine.numba_runtime import FLOAT, HALF

    outputs, features = blocks.shape
    memory, (weight,) = numba.pack_blocks([blocks], rows.element_size(), has_tiles and rows.dtype is torch.bfloat16)
    room = torch.empty(linear.scratch_size(len(rows), features) + linear.LINE, dtype=torch.uint8)
    scratch, output = -(-room.data_ptr() // linear.LINE) * linear.LINE, torch.full((len(rows), outputs), float("nan"))
    like: Any = FLOAT if rows.dtype is torch.float32 else HALF
    addresses = rows.data_ptr(), weight, 0 if bias is None else bias.data_ptr()
    for panel in range(-(-outputs // PANEL)):
        numba.multiply_quantized(
            like,
            has_tiles and rows.dtype is torch.bfloat16,
            numba.layout_of(blocks),
            *addresses,
            (output.data_ptr() + 4 * PANEL * panel, outputs),
            len(rows),
            outputs,
            features,
            panel,
            scratch,
        )
    assert memory.nbytes >= blocks.whole.nbytes + blocks.scales.nbytes  # and it lives until here
    return output


@kinds
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_the_product_with_the_dequantized_weight(
    sizes: tuple[int, int], kind: str, dtype: torch.dtype, has_tiles: bool
) -> None:
    blocks = blocks_of(sizes, kind)
    rows, bias = random(40, sizes[1], seed=2).to(dtype), random(sizes[0], seed=3).to(dtype)
    exact = dequantize(*blocks)
    for count in (1, 9, 40):
        poison()
        found, part = product(rows[:count].contiguous(), blocks, has_tiles, bias), rows[:count]
        is_rounded = has_tiles and dtype is torch.bfloat16
        if is_rounded:
            # The bits of the dense product with the weight in the dtype of the rows.
            assert torch.equal(found, linear.linear(part.contiguous(), exact.to(dtype), bias).float())
        wanted, sums = (
            part.double() @ exact.double().t() + bias.double(),
            part.double().abs() @ exact.double().abs().t(),
        )
        # n sums, a scale and a bias, rounded in fp32 (Higham, 2002, section 3.1); in bfloat16 the result too, and by
        # the matrix unit the weight.
        most = (sizes[1] + 2) * 2**-24 * (sums + bias.double().abs())
        if dtype is torch.bfloat16:
            most += 2**-8 * wanted.abs()
        if is_rounded:
            most += 2**-9 * sums
        assert bool(((found - wanted).abs() <= most).all())


@kinds
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(kind: str, dtype: torch.dtype, has_tiles: bool) -> None:
    blocks, rows = blocks_of((70, 608), kind), random(70, 608, seed=2).to(dtype)
    many = product(rows, blocks, has_tiles)
    for first, count in ((0, 1), (5, 2), (1, 4), (4, 7), (7, 9), (2, 13), (8, 16), (9, 17), (3, 33), (6, 64)):
        few = product(rows[first : first + count].contiguous(), blocks, has_tiles)
        assert torch.equal(few, many[first : first + count])


@pytest.mark.parametrize(("kind", "dtype"), [each for each in MULTIPLIED if each[0][0] == "q"])
def test_scales_that_half_precision_holds_without_an_exponent_are_exact(
    kind: str, dtype: torch.dtype, has_tiles: bool
) -> None:
    whole, scales = blocks_of((40, 64), kind)
    scales = (torch.arange(scales.numel()).view_as(scales) * 37 % 2048 * 2.0**-24).half()
    scales[::2] *= -1
    blocks = Blocks(whole, scales)
    assert torch.equal(
        product(torch.eye(64, dtype=dtype), blocks, has_tiles), dequantize(*blocks).t().to(dtype).float()
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12, 20])
@kinds
def test_every_whole_number_is_exact(kind: str, dtype: torch.dtype, count: int, has_tiles: bool) -> None:
    """Of a feature that a row has alone, outputs are the weights: here all numbers, -128 and -8 included."""
    bits, group, of_scales = KINDS[kind]
    numbers, features = 2**bits, GROUP * (count + 11)
    shifts = torch.arange(features) * 7 % numbers
    values = (torch.arange(numbers).unsqueeze(1) + shifts) % numbers
    whole = (values - numbers // 2).to(torch.int8)
    stored = whole if bits == 8 else (values[:, ::2] | values[:, 1::2] << 4).to(torch.uint8)
    blocks = Blocks(stored, torch.ones(numbers, features // (group or features), dtype=of_scales))
    for first in range(0, features - count, 29):
        found = product(torch.eye(features, dtype=dtype)[first : first + count].contiguous(), blocks, has_tiles)
        assert torch.equal(found, whole.t()[first : first + count].float())


# By narrower vectors without dot products, and with them but without a matrix unit.
PROCESSORS = {"haswell": "+sse4.2,+avx,+avx2,+fma", "cooperlake": "+avx2,+fma,+avx512f,+avx512bw,+avx512bf16"}
TESTED = """
import sys, pytest
from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, ROWS
from kitforge.core.kernels.linear.numba import prefers_matrix_unit
assert PAIRS == ("bf16" in sys.argv[1]) and (ROWS == 6) == ("avx512f" not in sys.argv[1]) and not prefers_matrix_unit()
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *sys.argv[2:]]))
"""


@pytest.mark.slow
@pytest.mark.prove(only=True)
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the other processors are of x86")
@pytest.mark.parametrize("name", PROCESSORS)
def test_other_processors_multiply_alike(name: str) -> None:
    """What no other test sees: the code that is compiled for a processor that this one is not, of weights as they are
    and of quantized ones; for this one the other tests see it. The second time it is loaded from the cache."""
    features = PROCESSORS[name]
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    linear_tests = str(Path(__file__).with_name("test_linear.py"))
    chosen = "vectors and ((70 and 45) or (int8 or int4) and (exact or 70 or bits))"
    command = [sys.executable, "-c", TESTED, features, __file__, linear_tests, "-k", chosen]
    for _ in range(2):
        subprocess.run(command, env=environment, check=True)
