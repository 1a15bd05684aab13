"""The calls that a Triton kernel accepts: float dtypes, and rows that one program holds."""

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.mixed_precision import compute_dtype

# The longest row that a program holds at once; an Ascend core has 192 KiB.
MAX_TRITON_ROW = {"npu": 2**13}
_GPU_ROW = 2**16
# The features of a head that a tile of `paged_attention` holds.
PAGED_HEAD = 256
# With more rows a product with the dequantized weight is faster.
MAX_QUANTIZED_ROWS = 256


def accepts_triton(input: Tensor, *_: object) -> bool:
    """Whether the input has a dtype that the kernels load."""
    return input.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def accepts_triton_rows(input: Tensor, *_: object) -> bool:
    """Whether one program also holds a whole row."""
    return accepts_triton(input) and 0 < input.shape[-1] <= MAX_TRITON_ROW.get(input.device.type, _GPU_ROW)


def accepts_triton_sampling(logits: Tensor, *_: object) -> bool:
    """Whether logits are in fp32, with a column at least, and need no gradient."""
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    return logits.dtype is torch.float32 and logits.shape[-1] > 0 and not needs_gradient


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
