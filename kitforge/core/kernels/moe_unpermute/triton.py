"""`moe_unpermute` in Triton: the k rows of a token are read once and added in fp32."""

from torch import Tensor

from kitforge.core.kernels.moe_permute.reference import Permutation
from kitforge.core.kernels.triton.moe import combine


def moe_unpermute(rows: Tensor, weights: Tensor, permutation: Permutation) -> Tensor:
    tokens: Tensor = combine(rows, permutation.positions, weights)
    return tokens
