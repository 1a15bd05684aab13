"""The one door for values that the host reads from tensors, which a fake tensor does not have."""

from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor

# Of a step that is traced: the rows of the rank whose experts are used most, by the mean of all ranks.
EXPERT_SKEW: ContextVar[float] = ContextVar("EXPERT_SKEW", default=1.0)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has shapes alone, in a step that is traced for its memory."""
    return isinstance(tensor, FakeTensor)


def host_list(tensor: Tensor, if_fake: Any) -> Any:
    """The values of a tensor as a list; of a fake one `if_fake`, what a usual step would read there."""
    return if_fake if is_fake(tensor) else tensor.tolist()
