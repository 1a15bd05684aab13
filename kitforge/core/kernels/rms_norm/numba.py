"""`rms_norm` of a few rows in one call, where the overhead of torch's operations exceeds their work."""

import numpy as np
import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled_fastmath, float32_at


def rms_norm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `RMSNormKernel`; on CPU, in fp32 or bfloat16, without gradients."""
    exact = input.float().contiguous()
    output = torch.empty_like(exact)
    is_exact = input.dtype is torch.float32
    factors = weight.contiguous()
    address = factors.data_ptr() if is_exact else 0
    dim = input.shape[-1]
    _normalize(exact.data_ptr(), address, output.data_ptr(), exact.numel() // max(dim, 1), dim, eps)
    # In half precision rows are rounded before they are multiplied by the weight.
    return output if is_exact else output.to(input.dtype) * factors


@compiled_fastmath
def _normalize(input: int, weight: int, output: int, num_rows: int, dim: int, eps: float) -> None:
    """`rms_norm` over arrays at these addresses; a weight at 0 is none."""
    shape = (num_rows, dim)
    rows, results, factors = float32_at(input, shape), float32_at(output, shape), float32_at(weight, (dim,))
    for row in range(num_rows):
        total = np.float32(0)
        for k in range(dim):
            total += rows[row, k] * rows[row, k]
        scale = np.float32(1) / np.sqrt(total / np.float32(dim) + np.float32(eps))
        for k in range(dim):
            results[row, k] = rows[row, k] * scale
        if weight:
            for k in range(dim):
                results[row, k] *= factors[k]
