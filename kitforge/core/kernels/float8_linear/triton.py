"""`float8_linear` with kernels that round a tensor to FP8, by rows and by columns, while they read it once more than
its largest element takes."""

import torch
from torch import Tensor

from kitforge.core.kernels.float8_linear.reference import apply_float8
from kitforge.core.kernels.triton.float8 import BLOCK, round_to_float8

# Whether the units add products of the forward pass in fewer bits than fp32 has, as torchao's recipes do.
ADDS_FAST = True


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply_float8(round_to_float8, _scaled_product, input, weight, bias)


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, is_gradient: bool
) -> Tensor:
    """Of operands that `round_to_float8` padded; the units also want a number of rows of `b` that blocks divide."""
    if not a.numel() or not b.numel():
        return torch.zeros(len(a), len(b), dtype=dtype, device=a.device)
    num_rows, width = b.shape
    if num_rows % BLOCK:
        padded = b.new_zeros(num_rows + -num_rows % BLOCK, width, dtype=torch.int8)
        padded[:num_rows] = b.view(torch.int8)
        return _scaled_product(a, padded.view(b.dtype), scale_a, scale_b, dtype, is_gradient)[:, :num_rows]
    # In bfloat16 or fp32; the units know no other result.
    result = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    fast = ADDS_FAST and not is_gradient
    scales = {"scale_a": scale_a, "scale_b": scale_b}
    return torch._scaled_mm(a, b.t(), **scales, out_dtype=result, use_fast_accum=fast).to(dtype)
