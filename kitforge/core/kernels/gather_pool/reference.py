"""The definition of `gather_pool`, in plain torch: every row of a batch is laid out, then added up in order."""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.core.kernels.bags import Bags
from kitforge.core.kernels.places import require
from kitforge.core.kernels.scratch import Scratch


def gather_pool(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    *,
    inverse: Tensor | None = None,
    bags: Bags | None = None,
    out: Tensor | None = None,
    scratch: Scratch | None = None,
) -> Tensor:
    """See `core.kernels.dispatch.GatherPool`."""
    require(slots, len(slab), "slots of the slab")
    if inverse is not None:
        require(inverse, len(slots), "places among the slots")
    rows = slab[slots if inverse is None else slots[inverse], :dim]
    if bags is not None:
        bags.require(len(rows))
        rows = _pooled(rows, bags)
    return rows if out is None else out.copy_(rows)


def _pooled(rows: Tensor, bags: Bags) -> Tensor:
    if bags.weights is not None:
        rows = rows * bags.weights.to(rows.dtype).unsqueeze(1)
    counts = bags.offsets.diff()
    members = torch.repeat_interleave(torch.arange(bags.num_bags, device=rows.device), counts)
    pooled = rows.new_zeros(bags.num_bags, rows.shape[1]).index_add_(0, members, rows)
    return pooled / counts.clamp(min=1).to(rows.dtype).unsqueeze(1) if bags.mode == "mean" else pooled
