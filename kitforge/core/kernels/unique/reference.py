"""The definition of `unique`: distinct ids in order of first occurrence."""

from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.tables.workspace import Workspace


class UniqueKernel(Protocol):
    """Distinct ids [u] of ids [N] int64 in order of first occurrence, and the index [N] of each id among them.

    Indices are written to `out` int64 [N] if given. `scratch` keeps buffers between calls.
    """

    def __call__(
        self, ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None
    ) -> tuple[Tensor, Tensor]: ...


def unique(ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None) -> tuple[Tensor, Tensor]:
    ascending, sorted_inverse = torch.unique(ids, return_inverse=True)
    first = torch.full_like(ascending, len(ids))
    first.scatter_reduce_(0, sorted_inverse, torch.arange(len(ids), device=ids.device), "amin")
    order = torch.argsort(first)
    inverse = torch.argsort(order)[sorted_inverse]
    return ascending[order], inverse if out is None else out.copy_(inverse)
