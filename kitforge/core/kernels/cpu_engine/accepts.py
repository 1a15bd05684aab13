"""The calls that a compiled loop accepts: few elements on CPU, without gradients."""

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES

# Elements below which waking a second thread, or calling another operation, takes longer than the work.
MAX_SMALL_ELEMENTS = 2**15
# With more rows the vendor's product is faster; with native bfloat16 that begins sooner.
FEW_ROWS, FEW_NATIVE_ROWS = 32, 8


def is_numba_eligible(tensor: Tensor) -> bool:
    """Whether it is on CPU, in fp32 or bfloat16, and gradients are off."""
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.bfloat16) and not torch.is_grad_enabled()


def accepts_linear(input: Tensor, weight: Tensor, *_: object) -> bool:
    """Whether input and weight are in fp32 or bfloat16, with few rows of input."""
    dtype = weight.dtype
    if torch.is_grad_enabled() or input.dtype is not dtype or dtype not in (torch.float32, torch.bfloat16):
        return False
    few = FEW_NATIVE_ROWS if dtype is torch.bfloat16 and NATIVE_DTYPES[dtype] else FEW_ROWS
    return (
        input.numel() <= few * input.shape[-1]
        and input.is_cpu
        and weight.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def accepts_rms_norm(input: Tensor, weight: Tensor, *_: object) -> bool:
    """Whether the input is small and in the dtype of the weight."""
    return input.numel() <= MAX_SMALL_ELEMENTS and is_numba_eligible(input) and weight.dtype is input.dtype


def accepts_rotary(input: Tensor, cos: Tensor, sin: Tensor, *_: object) -> bool:
    """Whether the input is small and the angles are [1, length, pairs] in fp32."""
    is_exact = cos.dtype is sin.dtype is torch.float32 and cos.shape[0] == 1
    return input.numel() <= MAX_SMALL_ELEMENTS and is_numba_eligible(input) and is_exact


def accepts_sampling(logits: Tensor, *_: object) -> bool:
    """Whether logits are in fp32 on CPU, with a column at least, and gradients are off."""
    return is_numba_eligible(logits) and logits.dtype is torch.float32 and logits.shape[-1] > 0


def accepts_decode_attention(_query: Tensor, keys: Tensor, values: Tensor, *_: object) -> bool:
    """Whether keys and values are contiguous."""
    return is_numba_eligible(keys) and keys.is_contiguous() and values.is_contiguous()
