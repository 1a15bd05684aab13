"""The one door for values that the host reads from tensors, which a fake tensor does not have."""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has shapes alone, in a step that is traced for its memory."""
    return isinstance(tensor, FakeTensor)


def host_list(tensor: Tensor, if_fake: Any) -> Any:
    """The values of a tensor as a list; of a fake one `if_fake`, what a usual step would read there."""
    return if_fake if is_fake(tensor) else tensor.tolist()
