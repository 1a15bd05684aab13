"""Moves of rows between tokens and experts: one Triton kernel each way, in the interpreter; `F.grouped_mm` between."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.dispatch import implementation
from kitforge.core.kernels.moe_permute.reference import permutation_of
from kitforge.core.kernels.triton import moe as triton_moe
from tests.core.kernels.comparison import distance, random
from tests.core.kernels.operations import routed


@pytest.mark.parametrize("shape", [(7, 1, 3), (9, 2, 4), (5, 3, 3), (1, 2, 8), (70, 2, 5), (0, 2, 3)])
def test_rows_are_sorted_by_expert_and_then_by_token(shape: tuple[int, int, int]) -> None:
    experts = routed(*shape)
    found = permutation_of(experts, shape[2])
    pairs = sorted((int(expert), token) for token, row in enumerate(experts) for expert in row)
    assert found.tokens.tolist() == [token for _, token in pairs]
    assert found.ends.tolist() == [sum(expert <= last for expert, _ in pairs) for last in range(shape[2])]
    assert found.ends.dtype == torch.int32
    for token, row in enumerate(experts.tolist()):
        assert [pairs[position] for position in found.positions[token].tolist()] == [(expert, token) for expert in row]


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
