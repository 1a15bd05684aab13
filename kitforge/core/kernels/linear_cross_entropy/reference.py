"""The definition of `linear_cross_entropy`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """See `dispatch.LinearCrossEntropyKernel`."""
    logits = functional.linear(hidden, weight)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(exact, targets, ignore_index=-100, reduction="sum")
