"""Moves of rows between tokens and experts: one Triton kernel each way, in the interpreter; `F.grouped_mm` between."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels import triton_moe
from kitforge.core.kernels.dispatch import REFERENCE, implementation
from kitforge.core.kernels.moe_permute.reference import Permutation, permutation_of
from tests.core.kernels.comparison import Call, distance, random, relative, results

SHAPES = [(7, 1, 3), (9, 2, 4), (5, 3, 3), (1, 2, 8), (70, 2, 5), (0, 2, 3)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def routed(num_tokens: int, k: int, num_experts: int) -> Tensor:
    """Distinct experts of each token, not all of them chosen."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    scores[:, 1] = -1 if num_experts > k else scores[:, 1]
    return scores.topk(k, dim=1).indices


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_sorted_by_expert_and_then_by_token(shape: tuple[int, int, int]) -> None:
    experts = routed(*shape)
    found = permutation_of(experts, shape[2])
    pairs = sorted((int(expert), token) for token, row in enumerate(experts) for expert in row)
    assert found.tokens.tolist() == [token for _, token in pairs]
    assert found.ends.tolist() == [sum(expert <= last for expert, _ in pairs) for last in range(shape[2])]
    assert found.ends.dtype == torch.int32
    for token, row in enumerate(experts.tolist()):
        assert [pairs[position] for position in found.positions[token].tolist()] == [(expert, token) for expert in row]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "shape", [each if each[0] < 10 else pytest.param(each, marks=pytest.mark.slow) for each in SHAPES]
)
def test_triton_is_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    permutation, dim = permutation_of(routed(*shape), shape[2]), {9: 1, 5: 64}.get(shape[0], 33)
    tokens, rows = random(shape[0], dim, dtype=dtype), random(shape[0] * shape[1], dim, dtype=dtype)
    weights = random(*shape[:2], dtype=dtype)

    def permute(name: str) -> Call:
        return lambda input: implementation("moe_permute", name, "cuda")(input, permutation)

    def unpermute(name: str) -> Call:
        return lambda input, weights: implementation("moe_unpermute", name, "cuda")(input, weights, permutation)

    assert distance(permute("triton"), permute("reference"), [tokens]) < TOLERANCE[dtype]
    assert distance(unpermute("triton"), unpermute("reference"), [rows, weights]) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_are_the_reference(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    permutation = permutation_of(routed(*shape), shape[2])
    tokens, rows = random(shape[0], 33, dtype=dtype), random(shape[0] * shape[1], 33, dtype=dtype)
    weights = random(*shape[:2], dtype=dtype)
    for operation, inputs in (("moe_permute", [tokens]), ("moe_unpermute", [rows, weights])):
        found, wanted = (
            (lambda *each, op=op: op(*each, permutation))
            for op in (implementation(operation, "fused"), getattr(REFERENCE, operation))
        )
        assert distance(found, wanted, inputs) < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_strided_rows_are_understood() -> None:
    permutation = permutation_of(routed(9, 2, 4), 4)
    for operation, wide in (("moe_permute", random(9, 20)), ("moe_unpermute", random(18, 20))):
        weights = [] if operation == "moe_permute" else [random(2, 9).t()]
        found, wanted = (
            results(lambda x, *w, op=op: op(x[:, 3:15], *w, permutation), [wide, *weights])
            for op in (implementation(operation, "triton", "cuda"), getattr(REFERENCE, operation))
        )
        assert max(map(relative, found, wanted)) < 1e-12


@pytest.mark.parametrize("shape", [(9, 2, 4), (33, 1, 3)])
def test_experts_between_them_are_a_loop_over_experts(shape: tuple[int, int, int]) -> None:
    num_tokens, k, num_experts = shape
    experts, input = routed(*shape), random(num_tokens, 16, dtype=torch.float32)
    weights, matrices = random(num_tokens, k, dtype=torch.float32), random(num_experts, 16, 8, dtype=torch.float32)

    def grouped(input: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
        permutation = permutation_of(experts, num_experts)
        rows = implementation("moe_permute", "triton", "cuda")(input, permutation)
        products = functional.grouped_mm(rows, matrices, offs=permutation.ends)
        output: Tensor = implementation("moe_unpermute", "triton", "cuda")(products, weights, permutation)
        return output

    def looped(input: Tensor, weights: Tensor, matrices: Tensor) -> Tensor:
        chosen = matrices[experts]  # [T, k, 16, 8]
        return ((input[:, None, None] @ chosen).squeeze(2) * weights.unsqueeze(-1)).sum(1)

    assert distance(grouped, looped, [input, weights, matrices]) < 1e-5


def test_a_fault_in_the_order_shows() -> None:
    permutation = permutation_of(routed(9, 2, 4), 4)
    wrong = Permutation(permutation.positions.flip(1), permutation.tokens, permutation.ends)
    op = implementation("moe_unpermute", "triton", "cuda")
    rows, weights = random(18, 5), random(9, 2)
    assert relative(op(rows, weights, wrong), REFERENCE.moe_unpermute(rows, weights, permutation)) > 1e-3


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_custom_ops_pass_opcheck() -> None:
    positions = permutation_of(routed(5, 2, 3), 3).positions
    tokens, rows, weights = random(5, 7), random(10, 7), random(5, 2)
    for given in (None, weights.clone().requires_grad_()):
        torch.library.opcheck(triton_moe.spread.op, (tokens.clone().requires_grad_(), positions, given))
        torch.library.opcheck(triton_moe.combine.op, (rows.clone().requires_grad_(), positions, given))
    torch.library.opcheck(triton_moe.weight_gradient.op, (tokens, rows, positions))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_gradient_of_the_gradient_is_the_sum_again() -> None:
    positions = permutation_of(routed(9, 2, 4), 4).positions

    def spread(tokens: Tensor, weights: Tensor) -> Tensor:
        rows = (tokens.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
        return rows[positions.flatten().argsort()]

    assert distance(lambda x, w: triton_moe.spread(x, positions, w), spread, [random(9, 5), random(9, 2)]) < 1e-12
