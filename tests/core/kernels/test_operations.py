"""Every implementation of an operation of networks is its reference: over shapes, dtypes, strides, what lies around the
numbers, and the gradients that come."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from kitforge.core.kernels.dispatch import IMPLEMENTATIONS, implementation, select
from tests.core.kernels.comparison import poison, random, relative, results
from tests.core.kernels.operations import (
    BF16,
    DRAWS,
    EDGES,
    F32,
    OPERATIONS,
    WITHOUT_GRADIENT,
    Draw,
    check,
    error,
)
from tests.differential.drawn import drawn

# Rows beyond the last one of a Triton program compute on nothing, and what they find is not written.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TORCH, NUMBA, TRITON = (
    [(operation, name) for operation in OPERATIONS for name in IMPLEMENTATIONS[operation] if name in names]
    for names in (("fused", "traceable", "chunked"), ("numba",), ("triton",))
)
# Those whose tests draw for themselves.
ELSEWHERE = {
    *("float8_linear", "paged_attention", "greedy_sample", "random_sample", "keep_mask", "fused_decode_step"),
    *("embedding_bag", "embedding_bag_backward", "sparse_update", "copy_rows", "swap_rows", "pread_rows"),
    *("unique", "hash_map"),
}


def test_every_operation_is_a_row_or_has_a_file() -> None:
    assert set(IMPLEMENTATIONS) == {*OPERATIONS, *ELSEWHERE}
    assert len(TORCH + NUMBA + TRITON) == sum(len(IMPLEMENTATIONS[operation]) for operation in OPERATIONS)


@pytest.mark.parametrize(("operation", "name"), TORCH + NUMBA + TRITON)
def test_it_is_its_reference_at_every_edge(operation: str, name: str) -> None:
    assert sum(check(operation, name, edge) for edge in EDGES) > 2


@pytest.mark.parametrize(("operation", "name"), TORCH + NUMBA)
@drawn(20, shrinks=False)
@given(draw=DRAWS)
def test_it_is_its_reference(operation: str, name: str, draw: Draw) -> None:
    check(operation, name, draw)


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "name"), TRITON)
@drawn(6, whole=300, shrinks=False)
@given(draw=DRAWS)
def test_triton_is_its_reference(operation: str, name: str, draw: Draw) -> None:
    check(operation, name, draw)


@pytest.mark.parametrize(("operation", "name"), NUMBA)
@torch.no_grad()
def test_models_take_the_compiled_loop(operation: str, name: str) -> None:
    case = OPERATIONS[operation](Draw(lead=(3,)), Random(1))
    own, chosen = (
        case.call(each)(*(tensor.float() for tensor in case.inputs))
        for each in (implementation(operation, name), getattr(select("O1"), operation))
    )
    assert torch.equal(own, chosen)


def doubled_epsilon(operation: Any) -> Any:
    return lambda input, weight, eps: operation(input, weight, 2 * eps)


def scale_without_gradient(_: Any) -> Any:
    return lambda x, weight, eps: x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + eps) * weight


def exchanged(operation: Any) -> Any:
    return lambda one, other: operation(other, one)


def other_direction(operation: Any) -> Any:
    return lambda input, cos, sin, interleaved: operation(input, cos, -sin, interleaved)


def off_by_a_billionth(operation: Any) -> Any:
    return lambda input, weight, *bias: operation(input, weight * (1 + 1e-9), *bias)


def last_row_left_out(operation: Any) -> Any:
    return lambda hidden, weight, targets: operation(hidden[:-1], weight, targets[:-1])


def other_scale(operation: Any) -> Any:
    return lambda *inputs, scale, **options: operation(*inputs, scale=scale + 1e-9, **options)


def row_of_the_neighbour(operation: Any) -> Any:
    return lambda input, weight, ends: operation(input, weight, ends - 1)


def other_order(operation: Any) -> Any:
    return lambda rows, weights, moved: operation(rows, weights, moved._replace(positions=moved.positions.flip(1)))


FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("rms_norm", "fused", doubled_epsilon),
    ("rms_norm", "fused", scale_without_gradient),
    ("swiglu", "fused", exchanged),
    ("geglu", "fused", exchanged),
    ("rotary", "fused", other_direction),
    ("linear", "fused", off_by_a_billionth),
    ("linear_cross_entropy", "chunked", last_row_left_out),
    ("attention", "fused", other_scale),
    ("grouped_linear", "fused", row_of_the_neighbour),
    ("moe_unpermute", "fused", other_order),
]


@pytest.mark.parametrize(("operation", "name", "fault"), FAULTS)
def test_a_fault_is_seen(operation: str, name: str, fault: Callable[[Any], Any]) -> None:
    found = fault(implementation(operation, name))
    assert max(error(operation, name, Draw(choice=choice), found) or 0 for choice in range(3)) > 1e-11


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("operation", "name"), [each for each in TORCH if each[0] not in WITHOUT_GRADIENT])
def test_only_gradients_that_are_wanted_are_found(operation: str, name: str, half: bool) -> None:
    case = OPERATIONS[operation](Draw(), Random(0))
    for place in range(len(case.inputs)):
        found: list[Any] = []
        for each in (name, "reference"):
            leaves = [tensor.to(F32 if half else tensor.dtype).clone() for tensor in case.inputs]
            leaves[place].requires_grad_()
            poison()
            with torch.autocast("cpu", BF16, enabled=half and each == name):
                output = case.call(implementation(operation, each))(*leaves)
            output.double().square().sum().backward()
            assert [leaf.grad is not None for leaf in leaves] == [number == place for number in range(len(leaves))]
            found.append(leaves[place].grad)
        assert relative(*found) < (5e-2 if half else 1e-12)


@pytest.mark.parametrize(("operation", "name"), [("swiglu", "fused"), ("geglu", "fused"), ("linear", "fused")])
def test_nothing_but_inputs_is_saved(operation: str, name: str) -> None:
    inputs = [each.requires_grad_() for each in OPERATIONS[operation](Draw(), Random(0)).inputs[:2]]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        implementation(operation, name)(*inputs)
    assert {each.data_ptr() for each in saved} == {each.data_ptr() for each in inputs}


@pytest.mark.parametrize("name", ["fused", "reference"])
def test_the_norm_of_a_row_of_zeros_is_zero(name: str) -> None:
    norm = partial(implementation("rms_norm", name), eps=1e-6)
    found = results(norm, [torch.zeros(2, 7), torch.ones(7)])
    assert torch.equal(found[0], torch.zeros(2, 7))
    assert all(torch.isfinite(each).all() for each in found)


@torch.no_grad()
def test_what_is_not_finite_shows_in_its_row_of_a_norm() -> None:
    input = torch.ones(4, 19)
    input[1, 3], input[2, 18] = float("nan"), float("inf")
    found = implementation("rms_norm", "numba")(input, torch.ones(19), 1e-6)
    assert found.isfinite().all(1).tolist() == [True, False, False, True]


@pytest.mark.parametrize("name", ["fused", "reference"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_lengths_and_leaves_the_rest_of_a_head(name: str, interleaved: bool) -> None:
    input, angles = random(2, 3, 7, 10), 3 * random(1, 7, 3)
    output = implementation("rotary", name)(input, angles.cos(), angles.sin(), interleaved)
    assert relative(output.norm(dim=-1), input.norm(dim=-1)) < 1e-12
    assert torch.equal(output[..., 6:], input[..., 6:])
    assert not torch.equal(output[..., :6], input[..., :6])


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_positions_only(interleaved: bool) -> None:
    def score(*places: float) -> Tensor:
        angles = [place * torch.tensor([[[1.0, 0.3, 0.01]]]).double() for place in places]
        query, key = (
            implementation("rotary", "fused")(random(1, 1, 1, 6, seed=seed), angle.cos(), angle.sin(), interleaved)
            for seed, angle in enumerate(angles)
        )
        product: Tensor = query * key
        return product.sum()

    assert relative(score(9.0, 4.0), score(105.0, 100.0)) < 1e-12
    assert relative(score(9.0, 4.0), score(4.0, 9.0)) > 1e-3
