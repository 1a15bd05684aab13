"""The calls that an implementation accepts: compiled loops few elements on CPU, without gradients; Triton kernels float
dtypes and rows that one program holds."""

import torch
from torch import Tensor

from kitforge.core.kernels.mixed_precision import NATIVE_DTYPES, compute_dtype
from kitforge.foundation import device as devices

# Elements below which waking a second thread, or calling another operation, takes longer than the work.
MAX_SMALL_ELEMENTS = 2**15
# With more rows the vendor's product is faster; with native bfloat16 that begins sooner.
FEW_ROWS, FEW_NATIVE_ROWS = 32, 8
# The longest row that a Triton program holds at once; an Ascend core has 192 KiB.
MAX_TRITON_ROW = {"npu": 2**13}
_GPU_ROW = 2**16
# The features of a head that a tile of `paged_attention` holds.
PAGED_HEAD = 256
# With more rows a product with the dequantized weight is faster.
MAX_QUANTIZED_ROWS = 256
_GROUPED_MM_CAPABILITIES = (9, 10)  # major, of Hopper and Blackwell


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


def accepts_triton_sampling(logits: Tensor, *_: object) -> bool:
    """Whether logits are in fp32, with a column at least, and need no gradient."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    return logits.dtype is torch.float32 and logits.shape[-1] > 0 and not needs_gradient


def accepts_decode_attention(_query: Tensor, keys: Tensor, values: Tensor, *_: object) -> bool:
    """Whether keys and values are contiguous."""
    return is_numba_eligible(keys) and keys.is_contiguous() and values.is_contiguous()


def accepts_triton(input: Tensor, *_: object) -> bool:
    """Whether the input has a dtype that the kernels load."""
    return input.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accepts_triton_rows(input: Tensor, *_: object) -> bool:
    """Whether one program also holds a whole row."""
    return accepts_triton(input) and 0 < input.shape[-1] <= MAX_TRITON_ROW.get(input.device.type, _GPU_ROW)


def accepts_triton_pages(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> bool:
    """Whether all are in one dtype that the kernel loads, and a tile of it fits."""
    return accepts_triton(query) and query.dtype == keys.dtype == values.dtype and query.shape[-1] <= PAGED_HEAD


def accepts_triton_quantized(input: Tensor, quantized: Tensor, scales: Tensor, *_: object) -> bool:
    """Whether input has few rows in a dtype that tensor cores multiply, and the kernel can step through a group."""
    num_features = input.shape[-1]
    rows, group = input.numel() // max(num_features, 1), num_features // max(scales.shape[1], 1)
    is_whole = quantized.dtype in (torch.int8, torch.uint8) and not torch.is_grad_enabled()
    is_dtype = input.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return is_whole and is_dtype and rows <= MAX_QUANTIZED_ROWS and (scales.shape[1] == 1 or group % 32 == 0)


def accepts_triton_logits(hidden: Tensor, weight: Tensor, *_: object) -> bool:
    """Whether no product is in fp16, whose gradients must be scaled before they are rounded."""
    return torch.float16 not in (hidden.dtype, weight.dtype, compute_dtype(hidden))


def accepts_grouped_mm(input: Tensor, weight: Tensor) -> bool:
    """Whether `F.grouped_mm` multiplies rows [R, in] and weight [E, out, in] in one kernel of the device. Elsewhere it
    is a loop that waits for the host, or refuses them."""
    if not input.is_cuda or input.dtype is not torch.bfloat16:
        return False
    widths = (input.shape[1] * input.element_size(), weight.shape[1] * input.element_size())
    is_aligned = all(each and each % 16 == 0 for each in widths)
    return is_aligned and devices.compute_capability(input.device)[0] in _GROUPED_MM_CAPABILITIES
