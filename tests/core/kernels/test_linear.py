import pytest
import torch
from torch.nn import functional

from kitforge.core.kernels.cpu_engine import accepts
from kitforge.core.kernels.dispatch import select
from kitforge.core.kernels.linear import fused
from kitforge.core.kernels.linear.fused import linear, traceable_linear
from tests.core.kernels.comparison import Call, autocast, random, relative, results

KERNELS = [linear, traceable_linear]


@pytest.mark.parametrize("native", [False], indirect=True)
@pytest.mark.parametrize("kernel", KERNELS)
def test_where_half_is_for_storage_only_the_input_is_all_that_is_rounded(kernel: Call, native: bool) -> None:
    input, weight, bias = (random(*shape, dtype=torch.float32) for shape in ((5, 7), (3, 7), (3,)))
    output, _, grad_weight, grad_bias = results(autocast(kernel), [input, weight, bias])
    rounded = input.bfloat16().float()
    assert torch.equal(output, functional.linear(rounded, weight, bias).bfloat16())
    gradient = random(5, 3, dtype=torch.bfloat16, seed=99).float()
    assert relative(grad_weight, gradient.t() @ rounded) < 1e-6
    assert relative(grad_bias, gradient.sum(0)) < 1e-6


@pytest.mark.parametrize("native", [False], indirect=True)
def test_inputs_in_half_precision_are_stored_as_they_are_and_shared(native: bool) -> None:
    input = random(5, 7, dtype=torch.bfloat16).requires_grad_()
    weights = [random(3, 7, dtype=torch.float32, seed=seed).requires_grad_() for seed in range(3)]
    kept: set[int] = set()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda each: (kept.add(each.data_ptr()), each)[1], lambda each: each),
    ):
        for weight in weights:
            linear(input, weight)
    assert kept == {each.data_ptr() for each in (input, *weights)}


@pytest.mark.parametrize("special", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_what_is_not_finite_shows_in_a_few_rows(special: str, dtype: torch.dtype) -> None:
    """The engine ends texts by it."""
    few_rows = pytest.importorskip("kitforge.core.kernels.linear.numba")
    input, weight = torch.ones(5, 19, dtype=dtype), torch.ones(6, 19, dtype=dtype)
    input[1, 3] = input[4, 17] = float(special)
    assert torch.equal(few_rows.linear(input, weight).isfinite().all(1), torch.tensor([True, False, True, True, False]))


@torch.no_grad()
def test_processors_that_multiply_bfloat16_themselves_take_fewer_rows_for_few(native: bool) -> None:
    input, weight = torch.ones(accepts.FEW_NATIVE_ROWS + 1, 7).bfloat16(), torch.ones(3, 7).bfloat16()
    assert accepts.accepts_linear(input, weight) != native
    assert accepts.accepts_linear(input[1:], weight)


@torch.no_grad()
def test_models_take_the_product_of_few_rows_where_it_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows = pytest.importorskip("kitforge.core.kernels.linear.numba")
    input, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert torch.equal(select("O1").linear(input, weight), few_rows.linear(input, weight))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert select.__wrapped__("O1").linear is fused.linear


def test_what_a_gradient_or_another_format_needs_is_left_to_torch() -> None:
    input, weight = torch.randn(1, 2, 4), torch.randn(3, 4)
    assert not accepts.accepts_linear(input, weight)
    with torch.no_grad():
        assert not accepts.accepts_linear(input.double(), weight.double())
        assert not accepts.accepts_linear(input, torch.randn(4, 3).t())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not accepts.accepts_linear(input, weight)


@torch.no_grad()
def test_a_weight_that_was_multiplied_may_still_give_up_its_memory() -> None:
    """As weights that are gathered from ranks do after each use."""
    few_rows = pytest.importorskip("kitforge.core.kernels.linear.numba")
    weight = torch.randn(3, 4)
    few_rows.linear(torch.randn(1, 4), weight)
    assert weight.untyped_storage().resizable()


@pytest.fixture(params=["vectors", "matrix unit"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The compiled product, by vector instructions or by the matrix unit where this processor has one."""
    module = pytest.importorskip("kitforge.core.kernels.linear.numba")
    is_wanted = request.param == "matrix unit"
    if is_wanted and not module.has_matrix_unit():
        pytest.skip("no matrix unit here")
    monkeypatch.setattr(module, "prefers_matrix_unit", lambda: is_wanted)
    call: Call = module.linear
    return call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(576, 70), (70, 45), (31, 3), (2100, 33)], ids=str)
@torch.no_grad()
def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    sizes: tuple[int, int], dtype: torch.dtype, compiled: Call
) -> None:
    weight, bias = random(sizes[1], sizes[0], seed=1).to(dtype), random(sizes[1], seed=2).to(dtype)
    rows = random(141, sizes[0], seed=3).to(dtype)
    many = compiled(rows, weight, bias)
    exact = functional.linear(rows.double(), weight.double(), bias.double())
    assert relative(many, exact) < (1e-5 if dtype is torch.float32 else 2**-8)
    for first, count in ((0, 1), (3, 1), (5, 2), (1, 4), (7, 9), (2, 13), (9, 64), (3, 70)):
        assert torch.equal(compiled(rows[first : first + count], weight, bias), many[first : first + count])
