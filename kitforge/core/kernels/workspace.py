"""Memory laid down once and taken again each step: fresh large tensors cost more in page faults than in work."""

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor


@final
class Workspace:
    """Named buffers that grow to the largest size asked for. One belongs to one thread at a time."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A contiguous CPU tensor of unset values; it is overwritten when `name` is taken again."""
        size, key = math.prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # A little more than was asked for, so that batches which grow slowly do not each lay it down anew.
            buffer = torch.empty(size + size // 8, dtype=dtype)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)

    @property
    def num_bytes(self) -> int:
        """How much memory is held."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
