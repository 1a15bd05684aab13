"""The definition of `linear_cross_entropy`."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class LinearCrossEntropyKernel(Protocol):
    """Cross entropy of `hidden [rows, dim] @ weight [vocab, dim].T` against targets [rows], in fp32, summed over the
    rows whose target is not -100. Returns a 0-dim sum."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor: ...


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """See `LinearCrossEntropyKernel`."""
    logits = functional.linear(hidden, weight)
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(exact, targets, ignore_index=-100, reduction="sum")
