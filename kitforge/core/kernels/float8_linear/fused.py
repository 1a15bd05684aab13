"""`float8_linear` by torch's scaled matrix products, which run on the FP8 units of a GPU."""

import torch
from torch import Tensor
from torch.nn import functional

from kitforge.core.kernels.float8_linear.reference import apply_float8, rows_and_columns

# Rows of which the units multiply a block.
BLOCK = 16


def float8_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return apply_float8(rows_and_columns, _scaled_product, input, weight, bias)


def _scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, is_gradient: bool
) -> Tensor:
    """The units want contiguous rows of both, of lengths that blocks divide."""
    del is_gradient
    short = -a.shape[1] % BLOCK
    rows, columns = a.contiguous(), b.contiguous()
    if short:
        rows, columns = (functional.pad(each.view(torch.int8), (0, short)).view(each.dtype) for each in (rows, columns))
    # In bfloat16 or fp32; the units know no other result.
    result = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    product = torch._scaled_mm(rows, columns.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=result)
    return product.to(dtype)
