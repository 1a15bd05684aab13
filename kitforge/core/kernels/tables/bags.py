"""Bags of ids in jagged layout, and how their rows are pooled."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kitforge.foundation.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bags:
    """Bag b holds the ids from `offsets[b]` to below `offsets[b + 1]`; an empty bag pools to zeros.

    The values of offsets are checked on CPU only: on an accelerator that would need a synchronization, and its kernels
    read no ids that are not there.
    """

    offsets: Tensor  # int64 [num_bags + 1], from 0 to the number of ids, never falling
    mode: Literal["sum", "mean"] = "sum"
    weights: Tensor | None = None  # [num_ids] each row is multiplied by its weight; a mean still divides by the count

    def __post_init__(self) -> None:
        """Raise DataError for invalid offsets."""
        offsets = self.offsets
        if offsets.dtype != torch.int64 or offsets.dim() != 1 or len(offsets) == 0:
            got = f"{str(offsets.dtype).removeprefix('torch.')} {list(offsets.shape)}"
            raise DataError("invalid offsets of bags", got=got, expected="int64 [num_bags + 1]")
        if offsets.is_cpu and (int(offsets[0]) != 0 or bool((offsets[1:] < offsets[:-1]).any())):
            raise DataError("invalid offsets of bags", expected="numbers that begin at 0 and never fall")

    @property
    def num_bags(self) -> int:
        """The number of bags."""
        return len(self.offsets) - 1

    def require(self, num_ids: int) -> None:
        """Raise DataError unless the bags hold `num_ids` ids, and as many weights if there are weights."""
        if self.offsets.is_cpu and int(self.offsets[-1]) != num_ids:
            raise DataError("the bags hold another number of ids", got=int(self.offsets[-1]), expected=num_ids)
        if self.weights is not None and self.weights.shape != (num_ids,):
            raise DataError("ids and weights differ in number", got=list(self.weights.shape), expected=[num_ids])
