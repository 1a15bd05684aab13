"""The definition of `embedding_bag` in plain torch: gathers all rows, then sums them in order."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.indexing import check_indices
from kitforge.core.kernels.tables.workspace import Workspace


class EmbeddingBagKernel(Protocol):
    """The first `dim` columns of rows of `slab` [rows, width]: id i has row `slots[i]`, or `slots[inverse[i]]`.

    Without bags the result is [num_ids, dim]. With bags the rows of each bag are weighted, summed in order and for a
    mean divided by their number: [num_bags, dim]. `out` of that shape is overwritten if given; `scratch` keeps buffers
    between calls. Raises ModelError for a slot or an index out of range.
    """

    def __call__(
        self,
        slab: Tensor,
        slots: Tensor,
        dim: int,
        *,
        inverse: Tensor | None = None,
        bags: Bags | None = None,
        out: Tensor | None = None,
        scratch: Workspace | None = None,
    ) -> Tensor: ...


def embedding_bag(
    slab: Tensor,
    slots: Tensor,
    dim: int,
    *,
    inverse: Tensor | None = None,
    bags: Bags | None = None,
    out: Tensor | None = None,
    scratch: Workspace | None = None,
) -> Tensor:
    check_indices(slots, len(slab), "slots of the slab")
    if inverse is not None:
        check_indices(inverse, len(slots), "indices of the slots")
    rows = slab[slots if inverse is None else slots[inverse], :dim]
    if bags is not None:
        bags.require(len(rows))
        if bags.weights is not None:
            rows = rows * bags.weights.to(rows.dtype).unsqueeze(1)
        counts = bags.offsets.diff()
        members = torch.repeat_interleave(torch.arange(bags.num_bags, device=rows.device), counts)
        rows = rows.new_zeros(bags.num_bags, rows.shape[1]).index_add_(0, members, rows)
        if bags.mode == "mean":
            rows = rows / counts.clamp(min=1).to(rows.dtype).unsqueeze(1)
    return rows if out is None else out.copy_(rows)
