"""The products of several experts: the loop into one output, and `F.grouped_mm` behind the same op."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.dispatch import REFERENCE, select
from kitforge.core.kernels.grouped_linear import fused
from kitforge.core.kernels.triton import moe as triton_moe
from tests.core.kernels.comparison import TOLERANCE, Call, distance, poison, random

# Rows, features in and out, and the ends: empty experts first, in the middle and last, no row at all, rows past the
# end.
CASES = {
    "even": (12, 8, 6, (3, 6, 9, 12)),
    "odd_widths": (11, 7, 5, (2, 2, 9, 11)),
    "first_and_last_empty": (9, 5, 3, (0, 4, 9, 9)),
    "one_expert": (4, 3, 2, (4,)),
    "one_has_all": (10, 6, 4, (0, 10, 10)),
    "no_row": (0, 4, 3, (0, 0)),
    "none_belongs": (5, 4, 3, (0, 0)),
    "past_the_end": (10, 6, 4, (2, 7)),
    "no_output": (4, 3, 0, (1, 4)),
}


def call(operation: object, ends: tuple[int, ...]) -> Call:
    return lambda input, weight: operation(input, weight, torch.tensor(ends, dtype=torch.int32))  # type: ignore[operator]


def operands(case: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    rows, features, out, ends = CASES[case]
    return random(rows, features, dtype=dtype), random(len(ends), out, features, dtype=dtype), ends


@pytest.mark.parametrize("case", CASES)
def test_each_row_meets_the_matrix_of_its_expert(case: str) -> None:
    input, weight, ends = operands(case)
    found = call(REFERENCE.grouped_linear, ends)(input, weight)
    for row in range(len(input)):
        expert = sum(end <= row for end in ends)
        wanted = weight[expert] @ input[row] if expert < len(ends) else weight.new_zeros(weight.shape[1])
        assert torch.allclose(found[row], wanted, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["even", "past_the_end", "one_has_all", "none_belongs"])
def test_grouped_mm_behind_the_op_is_the_reference_on_dirty_memory(case: str, dtype: torch.dtype) -> None:
    rows, _, _, ends = CASES[case]
    input, weight = random(rows, 16, dtype=dtype), random(len(ends), 24, 16, dtype=dtype)
    with (
        mock.patch.object(fused, "accepts_grouped_mm", return_value=True),
        mock.patch.object(fused.functional, "grouped_mm", side_effect=dirty_grouped_mm) as grouped_mm,
    ):
        found = distance(call(fused.grouped_linear, ends), call(REFERENCE.grouped_linear, ends), [input, weight])
    assert grouped_mm.call_count == 3
    assert found < TOLERANCE[dtype]


_grouped_mm = functional.grouped_mm


def dirty_grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
    """torch's, with NaN in the rows that it leaves without values."""
    output = _grouped_mm(left.contiguous() if right.dim() == 3 else left, right, offs=offs)
    if right.dim() == 3:
        output[int(offs[-1]) :] = float("nan")
    return output


@pytest.mark.parametrize("ends", [(2, 7), (0, 0), (1, 100), ()])
def test_zeros_are_written_past_the_last_end_alone(ends: tuple[int, ...]) -> None:
    rows = random(100, 33, dtype=torch.bfloat16)
    found = rows.clone()
    triton_moe.zero_past(found, torch.tensor(ends, dtype=torch.int32))
    last = ends[-1] if ends else 0
    assert torch.equal(found[:last], rows[:last])
    assert not found[last:].any()


def test_only_wanted_gradients_are_computed() -> None:
    input, weight, ends = operands("even")
    output = call(select("O1").grouped_linear, ends)(input, weight.requires_grad_())
    with mock.patch.object(fused, "_multiply", side_effect=fused._multiply) as multiply:
        output.sum().backward()
    assert multiply.call_count == len(ends)
    assert weight.grad is not None
    assert input.grad is None


def test_memory_past_the_last_end_is_never_read() -> None:
    input, weight, ends = operands("past_the_end")
    poison()
    dirty = input.clone()
    dirty[ends[-1] :] = float("nan")
    grouped_linear = call(select("O1").grouped_linear, ends)
    assert torch.equal(grouped_linear(dirty, weight), grouped_linear(input, weight))


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_op_passes_opcheck() -> None:
    input, weight, ends = operands("past_the_end", torch.float32)
    arguments = (input.requires_grad_(), weight.requires_grad_(), torch.tensor(ends, dtype=torch.int32))
    torch.library.opcheck(fused._grouped_linear.op, arguments)
