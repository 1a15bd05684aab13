"""Types shared by all layers: micro-batches, tensor regions, cursors, savable objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

# The input of one forward and backward: names to tensors (first dim: samples) or plain values.
MicroBatch = Mapping[str, Any]
# Sums over a micro-batch, or denominators of a step, by name.
Sums = dict[str, Tensor]
# What happens to rows that cannot be used: an error that names the first, or left out and counted.
OnInvalid = Literal["refuse", "skip"]
IGNORED = -100  # the target or label without a loss, as torch's cross entropy and transformers have it


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box within a named global tensor: offset and shape, one number per dimension."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Region:
        """The region of a whole tensor."""
        return cls(global_shape=tuple(shape), offset=(0,) * len(shape), shape=tuple(shape))

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the region within the whole tensor."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The data position of a run. Data order is a pure function of it, so a resume needs nothing else."""

    step: int = 0  # optimizer steps tried, skipped ones included
    samples: int = 0  # samples consumed over all epochs
    tokens: int = 0  # tokens consumed; 0 for tasks without tokens

    def advance(self, *, samples: int, tokens: int) -> Cursor:
        """The cursor after one more step."""
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)
