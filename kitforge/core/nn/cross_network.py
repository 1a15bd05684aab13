"""Feature interactions: the cross network of DCN v2 and the dot products of DLRM."""

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.linear import Linear


class CrossNetwork(nn.Module):
    """`x[l + 1] = x[0] * (W x[l] + b) + x[l]` over input [B, dim] (Wang et al., 2021).

    With a rank, W = U V with V [rank, dim] and U [dim, rank].
    """

    def __init__(self, dim: int, num_layers: int, *, rank: int | None, kernels: Kernels) -> None:
        super().__init__()
        self.outer = nn.ModuleList(Linear(rank or dim, dim, bias=True, kernels=kernels) for _ in range(num_layers))
        inner = 0 if rank is None else num_layers
        self.inner = nn.ModuleList(Linear(dim, rank or dim, bias=False, kernels=kernels) for _ in range(inner))

    def forward(self, input: Tensor) -> Tensor:
        """[B, dim] -> [B, dim]."""
        state = input
        for number, outer in enumerate(self.outer):
            state = input * outer(self.inner[number](state) if self.inner else state) + state
        return state


def dot_interaction(vectors: Tensor) -> Tensor:
    """Dot products of all pairs of distinct vectors, [B, F, dim] -> [B, F (F - 1) / 2], in the order of the lower
    triangle (Naumov et al., 2019)."""
    num_features = vectors.shape[1]
    products = vectors @ vectors.transpose(1, 2)
    rows, columns = torch.tril_indices(num_features, num_features, offset=-1, device=vectors.device)
    return products[:, rows, columns]
