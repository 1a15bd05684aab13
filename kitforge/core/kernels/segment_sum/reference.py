"""The definition of `segment_sum`, in plain torch: the gradient of every id is laid out, then added up in order."""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.core.kernels.bags import Bags
from kitforge.core.kernels.places import require


def segment_sum(
    gradients: Tensor,
    inverse: Tensor,
    num_rows: int,
    *,
    bags: Bags | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `core.kernels.dispatch.SegmentSum`."""
    require(inverse, num_rows, "places among the rows")
    parts = gradients if bags is None else _spread(gradients, bags, len(inverse))
    if out is None:
        out = parts.new_empty(num_rows, parts.shape[1])
    return out.zero_().index_add_(0, inverse, parts)


def _spread(gradients: Tensor, bags: Bags, num_ids: int) -> Tensor:
    """What of the gradients [num_bags, dim] comes to each id [num_ids, dim]."""
    bags.require(num_ids)
    counts = bags.offsets.diff()
    if bags.mode == "mean":
        gradients = gradients / counts.clamp(min=1).to(gradients.dtype).unsqueeze(1)
    parts = gradients[torch.repeat_interleave(torch.arange(bags.num_bags, device=counts.device), counts)]
    return parts if bags.weights is None else parts * bags.weights.to(parts.dtype).unsqueeze(1)
