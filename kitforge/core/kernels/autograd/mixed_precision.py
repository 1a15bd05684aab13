"""Dtypes of products under autocast and half precision, by what the device supports."""

import torch
from torch import Tensor

from kitforge.foundation import device

# Whether the processor has native products in these dtypes. Asked once, since torch.compile cannot trace the question.
NATIVE_DTYPES = {dtype: device.has_native_matmul(dtype) for dtype in (torch.bfloat16, torch.float16)}


def compute_dtype(input: Tensor) -> torch.dtype:
    """The dtype of products of `input`: autocast's where it is on, else the input's own."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return input.dtype


def storage_dtype(input: Tensor) -> torch.dtype | None:
    """The half-precision dtype to store `input` in where products run in fp32; None where they run natively."""
    wanted = compute_dtype(input)
    if input.device.type != "cpu" or NATIVE_DTYPES.get(wanted, True):
        return None
    return wanted


def match_dtype(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of `input`, unless autocast casts them. They differ, for example, when a model
    generates with weights that were gathered in half precision."""
    if weight.dtype == input.dtype or torch.is_autocast_enabled(input.device.type):
        return weight, bias
    return weight.to(input.dtype), None if bias is None else bias.to(input.dtype)


def product_operands(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the dtype that this device multiplies in."""
    half = storage_dtype(hidden)
    if half is not None:
        return hidden.to(half).to(weight.dtype), weight
    dtype = compute_dtype(hidden)
    return hidden.to(dtype), weight.to(dtype)
