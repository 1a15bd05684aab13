"""The definition of `unique`: distinct ids in the order in which they first occur."""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.core.kernels.workspace import Workspace


def unique(ids: Tensor, out: Tensor | None = None, scratch: Workspace | None = None) -> tuple[Tensor, Tensor]:
    """See `core.kernels.dispatch.UniqueKernel`."""
    ascending, sorted_inverse = torch.unique(ids, return_inverse=True)
    first = torch.full_like(ascending, len(ids))
    first.scatter_reduce_(0, sorted_inverse, torch.arange(len(ids), device=ids.device), "amin")
    order = torch.argsort(first)
    inverse = torch.argsort(order)[sorted_inverse]
    return ascending[order], inverse if out is None else out.copy_(inverse)
