"""The few types that every floor speaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

# What one forward and backward consumes: names to tensors (first dim: samples) or plain values.
MicroBatch = Mapping[str, Any]
# Sums over a micro-batch, or denominators of a step, by name.
Sums = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where a run takes place."""

    device: torch.device


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
