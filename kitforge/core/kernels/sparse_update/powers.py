"""The powers of Adam's betas, as far as they differ from zero: tables of a size that no number of steps exceeds."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor

# Entries laid down at first; there are twice as many whenever they run out.
FIRST_ENTRIES = 1024


@final
class Powers:
    """beta^t and 1 - beta^t for both betas, rounded to the dtype of a slab.

    From some t on a power is zero in that dtype, and 1 - beta^t is one, so the tables end there: 104,000 entries for a
    beta of 0.999 in fp32.
    """

    def __init__(self, betas: tuple[float, ...]) -> None:
        self.betas = betas
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tables(self, last: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """beta^t and 1 - beta^t [2, n], in the dtype and on the device of `like`. Whatever t up to `last` has its value
        at the place min(t, n - 1)."""
        key = (like.dtype, like.device)
        known = self._tables.get(key)
        if known is not None and known[0].shape[1] > min(last, self._end(like.dtype)):
            return known
        num = min(max(2 * last, FIRST_ENTRIES), self._end(like.dtype)) + 1
        # By Python's power: torch's depends on the place within a vector.
        exact = torch.tensor([[beta**power for power in range(num)] for beta in self.betas], dtype=torch.float64)
        self._tables[key] = (exact.to(like.device, like.dtype), (1.0 - exact).to(like.device, like.dtype))
        return self._tables[key]

    def _end(self, dtype: torch.dtype) -> int:
        """The first t whose powers are all less than half of the smallest number of the dtype."""
        info = torch.finfo(dtype)
        smallest = math.log(info.smallest_normal) + math.log(info.eps) - math.log(2)
        return max(1 if beta == 0 else math.ceil(smallest / math.log(beta)) + 1 for beta in self.betas)
