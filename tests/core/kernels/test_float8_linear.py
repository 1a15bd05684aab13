"""Linear layers in FP8 against their definition, and against the exact product within what FP8 rounds."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels import dispatch
from kitforge.core.kernels.dispatch import REFERENCE, select
from kitforge.core.kernels.float8_linear.reference import rows_and_columns, to_float8
from kitforge.core.kernels.triton.float8 import round_to_float8
from kitforge.core.nn.linear import Linear
from kitforge.foundation.device import check_float8
from kitforge.foundation.errors import DeviceError
from kitforge.trainer.precision import autocast, use_precision
from tests.core.kernels.comparison import autocast as under_autocast
from tests.core.kernels.comparison import random, relative, results
from tests.core.nn import networks
from tests.differential.drawn import WHOLE
from tests.pairs import pairs

FUSED = select("O1").float8_linear
TRITON = dispatch._load("float8_linear", "triton")
BOTH = pytest.mark.parametrize("kernel", [FUSED, TRITON], ids=["fused", "triton"])


def inputs_of(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(*shape, 32, dtype=dtype), random(48, 32, dtype=dtype) * 0.1, random(48, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(16,), (2, 24), (5,), (1,), (0,), (3, 0)])
@BOTH
def test_scaled_products_are_the_definition(kernel: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = inputs_of(*shape, dtype=dtype)
    found, wanted = results(kernel, inputs), results(REFERENCE.float8_linear, inputs)
    assert [each.shape for each in found] == [each.shape for each in wanted]
    assert max(map(relative, found, wanted)) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kernel", [FUSED, TRITON, REFERENCE.float8_linear])
def test_it_is_near_the_exact_product_and_not_it(kernel: object) -> None:
    assert callable(kernel)
    inputs = inputs_of(64)
    found, wanted = results(kernel, inputs), results(REFERENCE.linear, inputs)
    # e4m3 keeps three bits behind the first one, e5m2 two: an error of 2**-4 and 2**-3 an element at most.
    for own, exact in zip(found, wanted, strict=True):
        distance = float((own - exact).norm() / exact.norm())
        assert distance < 0.08
    assert relative(found[0], wanted[0]) > 1e-4


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_largest_element_is_the_largest_number(size: float, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.25, -1.0, 0.0]) * size
    rounded, scale = to_float8(tensor, dtype)
    assert rounded.float().abs().max() == torch.finfo(dtype).max
    torch.testing.assert_close(rounded.float() * scale, tensor, rtol=1e-5, atol=0)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("shape", "layout", "dtype", "to"),
    [
        *(product if WHOLE else pairs)(
            [(0, 4), (5, 7), (33, 65)],
            ["rows", "columns", "every_other", "one_number"],
            [torch.float32, torch.bfloat16, torch.float16, torch.float64],
            [torch.float8_e4m3fn, torch.float8_e5m2],
        )
    ],
)
def test_both_layouts_of_the_kernel_are_the_definition(
    shape: tuple[int, int], layout: str, dtype: torch.dtype, to: torch.dtype
) -> None:
    rows, columns = shape
    tensor = {
        "rows": lambda: random(rows, columns, dtype=dtype),
        "columns": lambda: random(columns, rows, dtype=dtype).t(),
        "every_other": lambda: random(2 * rows, 2 * columns, dtype=dtype)[::2, ::2],
        "one_number": lambda: torch.full((), 0.3, dtype=dtype).expand(rows, columns),
    }[layout]()
    found, wanted = round_to_float8(tensor, to), rows_and_columns(tensor, to)
    for own, exact in zip(found[:2], wanted[:2], strict=True):
        assert own.shape == (len(exact), exact.shape[1] + -exact.shape[1] % 16)
        assert torch.equal(own[:, : exact.shape[1]].float(), exact.float())
        assert not own[:, exact.shape[1] :].float().any()
    assert torch.equal(found[2], wanted[2])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e30, 3e38])
def test_the_kernel_scales_the_smallest_and_the_largest_numbers(size: float) -> None:
    tensor = torch.tensor([[0.25, -1.0, 0.0]]) * size
    found, wanted = round_to_float8(tensor, torch.float8_e4m3fn), rows_and_columns(tensor, torch.float8_e4m3fn)
    assert torch.equal(found[0][:, :3].float(), wanted[0].float())
    assert torch.equal(found[2], wanted[2])


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_custom_op_passes_opcheck() -> None:
    torch.library.opcheck(round_to_float8.op, (random(5, 7, dtype=torch.float32), torch.float8_e5m2))


@BOTH
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_zeros_stay_and_what_is_not_finite_shows(kernel: Any) -> None:
    rounded, scale = to_float8(torch.zeros(3), torch.float8_e4m3fn)
    assert torch.equal(rounded.float(), torch.zeros(3))
    assert torch.isfinite(scale)
    for bad in (torch.inf, torch.nan):
        inputs = inputs_of(16)
        inputs[0][3, 4] = bad
        assert not torch.isfinite(kernel(*inputs)).all()


def test_under_autocast_the_result_has_its_dtype_and_weights_get_theirs() -> None:
    output, *gradients = results(under_autocast(FUSED), inputs_of(16))
    assert output.dtype == torch.bfloat16
    assert {each.dtype for each in gradients} == {torch.float32}


@BOTH
def test_one_byte_an_element_is_saved(kernel: Any) -> None:
    inputs = [each.requires_grad_() for each in inputs_of(64)]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        kernel(*inputs)
    assert sum(each.numel() * each.element_size() for each in saved) == 64 * 32 + 48 * 32 + 8


def test_precision_fp8_turns_linear_layers_and_no_head() -> None:
    model = networks.build(networks.CONFIGS["glm"], "O1", torch.float32)
    tokens = torch.arange(12).view(2, 6)
    with autocast(torch.device("cpu"), "bf16"):
        before = model(tokens)
    use_precision(model, "bf16", torch.device("cpu"))
    with autocast(torch.device("cpu"), "bf16"):
        assert torch.equal(model(tokens), before)
    use_precision(model, "fp8", torch.device("cpu"))
    with autocast(torch.device("cpu"), "fp8"):
        after = model(tokens)
    assert after.dtype == before.dtype == torch.bfloat16
    assert 0 < float((after - before).detach().float().norm() / before.detach().float().norm()) < 0.2
    layers = [each for each in model.modules() if isinstance(each, Linear)]
    assert all(each.is_float8 for each in layers)
    # Dims that no block divides keep the product of the model's dtype.
    odd = Linear(20, 32, bias=False, kernels=model.kernels)
    use_precision(odd, "fp8", torch.device("cpu"))
    assert not odd.is_float8


def test_a_device_without_fp8_units_is_refused() -> None:
    with pytest.raises(DeviceError, match="precision=fp8 needs FP8"):
        check_float8(torch.device("mps"))
    check_float8(torch.device("cpu"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@BOTH
def test_the_compiler_traces_it_without_a_break(kernel: Any) -> None:
    inputs = inputs_of(16)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    assert max(map(relative, results(compiled, inputs), results(kernel, inputs))) < 1e-6


def test_gradients_have_the_range_of_e5m2() -> None:
    inputs = [each.requires_grad_() for each in inputs_of(16)]
    grad = torch.zeros(16, 48)
    # The second would be zero in e4m3, whose smallest number is 4e-6 of the largest.
    grad[0, 0], grad[1, 1] = 1.0, 1e-7
    (found,) = torch.autograd.grad(FUSED(*inputs), inputs[0], grad)
    assert found[1].abs().max() > 0
    torch.testing.assert_close(found[1], inputs[1][1] * 1e-7, rtol=0.3, atol=1e-9)


@BOTH
def test_matrix_units_get_what_they_want(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled_mm = torch._scaled_mm

    def strict(
        a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **options: bool
    ) -> Tensor:
        assert a.shape[1] % 16 == b.shape[0] % 16 == b.shape[1] % 16 == 0
        assert a.is_contiguous()
        assert b.t().is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32
        assert scale_a.numel() == scale_b.numel() == 1
        assert out_dtype in (torch.bfloat16, torch.float32)
        return scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype, **options)

    monkeypatch.setattr(torch, "_scaled_mm", strict)
    for rows, dtype in zip((1, 5, 16, 33), (torch.float32, torch.bfloat16, torch.float16, torch.float32), strict=True):
        results(kernel, inputs_of(rows, dtype=dtype))
