"""Indexing on CPU in one thread by numpy, and range checks of indices.

torch splits even a few thousand elements over its threads. On a busy machine these wake late and then spin, which takes
milliseconds where the work takes twenty microseconds.
"""

import torch
from torch import Tensor

from kitforge.foundation.errors import ModelError


def at(values: Tensor, indices: Tensor) -> Tensor:
    """`values[indices]` of values [n] on CPU."""
    return torch.from_numpy(values.numpy()[indices.numpy()])


def put(values: Tensor, indices: Tensor, value: Tensor | float) -> None:
    """`values[indices] = value` of values [n] on CPU."""
    values.numpy()[indices.numpy()] = value.numpy() if isinstance(value, Tensor) else value


def where(mask: Tensor) -> Tensor:
    """The indices [n] at which a mask on CPU is True, ascending."""
    return torch.from_numpy(mask.numpy().nonzero()[0])


def check_indices(indices: Tensor, count: int, what: str) -> None:
    """Raise ModelError unless all `indices` on CPU are from 0 to below `count`; `what` names them. Those on an
    accelerator are not read, which would need a synchronization: its kernels leave such indices out."""
    if not len(indices) or not indices.is_cpu:
        return
    # One thread is as fast, and torch's worker threads would go on spinning.
    lowest, highest = int(indices.numpy().min()), int(indices.numpy().max())
    if lowest < 0 or highest >= count:
        got = lowest if lowest < 0 else highest
        raise ModelError(f"an index is outside of the {what}", got=got, expected=f"from 0 to below {count}")
