"""Indices on the CPU: how to follow them, and the check that they may be followed.

Following is numpy's, in one thread: torch shares even a few thousand numbers among its threads, which wake late on a
busy machine and then spin in the way of ours, for milliseconds where the work takes twenty microseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError


def at(values: Tensor, indices: Tensor) -> Tensor:
    """`values[places]` of values [n] on the CPU."""
    return torch.from_numpy(values.numpy()[indices.numpy()])


def put(values: Tensor, indices: Tensor, value: Tensor | float) -> None:
    """`values[places] = value` of values [n] on the CPU."""
    values.numpy()[indices.numpy()] = value.numpy() if isinstance(value, Tensor) else value


def where(mask: Tensor) -> Tensor:
    """The places [n] at which a mask on the CPU holds, ascending."""
    return torch.from_numpy(mask.numpy().nonzero()[0])


def check_indices(indices: Tensor, count: int, what: str) -> None:
    """Raise ModelError unless all `indices` are from 0 to below `count`."""
    if not len(indices):
        return
    # On the CPU one thread is as fast, and torch's other ones would go on spinning in the way of ours.
    lowest, highest = (
        (indices.numpy().min(), indices.numpy().max()) if indices.device.type == "cpu" else indices.aminmax()
    )
    if int(lowest) < 0 or int(highest) >= count:
        got = int(lowest if lowest < 0 else highest)
        raise ModelError(f"these are not all {what}", got=got, expected=f"from 0 to below {count}")
