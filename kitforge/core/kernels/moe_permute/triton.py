"""`moe_permute` in Triton: each token is read once and written k times."""

from torch import Tensor

from kitforge.core.kernels.moe_permute.reference import Permutation
from kitforge.core.kernels.triton.moe import spread


def moe_permute(input: Tensor, permutation: Permutation) -> Tensor:
    rows: Tensor = spread(input, permutation.positions, None)
    return rows
