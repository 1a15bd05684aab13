"""How half precision is computed on the device at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from kitforge.foundation import device

# Whether the processor multiplies in these itself. Asked once, here: a compiler cannot look into the question.
NATIVE_DTYPES = {dtype: device.has_native_matmul(dtype) for dtype in (torch.bfloat16, torch.float16)}


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype that products of `input` are wanted in: autocast's where it is on, else the input's own."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return input.dtype


def storage_dtype(input: Tensor) -> torch.dtype | None:
    """The half format that `input` should be stored in while products are taken in fp32; None where the device
    multiplies in the wanted format itself."""
    wanted = compute_dtype(input)
    if input.device.type != "cpu" or NATIVE_DTYPES.get(wanted, True):
        return None
    return wanted


def match_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What to multiply `input` with: in its dtype where they differ and no autocast sees to it, as when a model whose
    weights were gathered in half precision generates."""
    if weight.dtype == input.dtype or torch.is_autocast_enabled(input.device.type):
        return weight, bias
    return weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
