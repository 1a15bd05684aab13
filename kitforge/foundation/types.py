"""The few types that every floor speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

# What one forward and backward consumes: names to tensors (first dim: samples) or plain values.
MicroBatch = Mapping[str, Any]
# Sums over a micro-batch, or denominators of a step, by name.
Sums = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A box within a named global tensor: where it starts and how large it is, one number a dim."""

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Region:
        """All of a tensor."""
        return cls(global_shape=tuple(shape), offset=(0,) * len(shape), shape=tuple(shape))

    @property
    def is_full(self) -> bool:
        """Whether it is all of the tensor."""
        return self.shape == self.global_shape

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the region within the whole tensor."""
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a run has come. Data order is a pure function of it, so it is all that a resume needs."""

    step: int = 0  # optimizer steps tried, skipped ones included
    samples: int = 0  # samples consumed over all epochs
    tokens: int = 0  # tokens consumed, or 0 where a task has none

    def advance(self, *, samples: int, tokens: int) -> Cursor:
        """The cursor after one more step."""
        return replace(self, step=self.step + 1, samples=self.samples + samples, tokens=self.tokens + tokens)


@runtime_checkable
class Savable(Protocol):
    """What can be written as named tensors, streamed so that no second copy of the whole is held."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, in a fixed order."""
        ...
