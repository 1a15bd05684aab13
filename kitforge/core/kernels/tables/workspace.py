"""Reusable buffers: page faults of a freshly allocated large tensor cost more than the work on it."""

import math

import torch
from torch import Tensor


class Workspace:
    """Named buffers that grow to the largest requested size. Not thread-safe."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialized contiguous CPU tensor; taking `name` again overwrites it."""
        size, key = math.prod(shape), (name, dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            # An eighth more than requested, so that slowly growing batches do not reallocate each time.
            buffer = torch.empty(size + size // 8, dtype=dtype)
            self._buffers[key] = buffer
        return buffer[:size].view(shape)
