"""The definition of `embedding_bag_backward` in plain torch: one gradient per id, summed in order."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.indexing import check_indices


class EmbeddingBagBackwardKernel(Protocol):
    """The gradients of `num_rows` distinct rows from `gradients` of the output of `embedding_bag`.

    Id i has row `inverse[i]`. The contributions to a row are summed in the order of the ids. `out` [num_rows, dim] is
    overwritten if given. Raises ModelError for an index out of range.
    """

    def __call__(
        self, gradients: Tensor, inverse: Tensor, num_rows: int, *, bags: Bags | None = None, out: Tensor | None = None
    ) -> Tensor: ...


def embedding_bag_backward(
    gradients: Tensor, inverse: Tensor, num_rows: int, *, bags: Bags | None = None, out: Tensor | None = None
) -> Tensor:
    check_indices(inverse, num_rows, "indices of the rows")
    # The gradient of each id [N, dim], from those of bags [num_bags, dim].
    parts = gradients
    if bags is not None:
        bags.require(len(inverse))
        counts = bags.offsets.diff()
        if bags.mode == "mean":
            parts = parts / counts.clamp(min=1).to(parts.dtype).unsqueeze(1)
        parts = parts[torch.repeat_interleave(torch.arange(bags.num_bags, device=counts.device), counts)]
        parts = parts if bags.weights is None else parts * bags.weights.to(parts.dtype).unsqueeze(1)
    if out is None:
        out = parts.new_empty(num_rows, parts.shape[1])
    return out.zero_().index_add_(0, inverse, parts)
