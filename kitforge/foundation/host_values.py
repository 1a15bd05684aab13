"""The one door for values that the host reads from tensors, which a fake tensor does not have."""

from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def host_list(tensor: Tensor, if_fake: Any) -> Any:
    """The values of a tensor as a list. A fake tensor, of a step that is traced for its memory, has shapes alone:
    `if_fake` is what a usual step would read there."""
    return if_fake if isinstance(tensor, FakeTensor) else tensor.tolist()
