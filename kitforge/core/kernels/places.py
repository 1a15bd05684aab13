"""The check that an index may be followed: compiled loops would read whatever memory lies there."""

from __future__ import annotations

from torch import Tensor

from kitforge.foundation.errors import ModelError


def require(places: Tensor, count: int, what: str) -> None:
    """Raise ModelError unless all `places` are from 0 to below `count`."""
    if not len(places):
        return
    # On the CPU one thread is as fast, and torch's other ones would go on spinning in the way of ours.
    lowest, highest = (places.numpy().min(), places.numpy().max()) if places.device.type == "cpu" else places.aminmax()
    if int(lowest) < 0 or int(highest) >= count:
        got = int(lowest if lowest < 0 else highest)
        raise ModelError(f"these are not all {what}", got=got, expected=f"from 0 to below {count}")
