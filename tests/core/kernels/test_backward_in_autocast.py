"""A backward pass computes what its forward pass asks for, also where a training loop calls `backward` within
`torch.autocast`."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import Kernels, select
from kitforge.verify.kernel_cases import kernel_cases


def biased(kernels: Kernels) -> Callable[..., Tensor]:
    """Attention with a learned bias."""
    return lambda query, key, value, bias: kernels.attention(
        query, key, value, mask=None, causal=True, scale=0.25, bias=bias
    )


CPU = torch.device("cpu")
CASES = kernel_cases(CPU)
CASES |= {"attention under a bias": (biased, [torch.randn(2, 4, 33, 16) for _ in range(3)] + [torch.randn(4, 33, 33)])}


@pytest.mark.parametrize("name", [name for name in CASES if "quantized" not in name and "paged" not in name])
def test_gradients_have_the_bits_of_a_backward_pass_outside(name: str) -> None:
    get, arguments = CASES[name]
    gradients = []
    for is_inside in (True, False):
        leaves = [each.float().requires_grad_() for each in arguments]
        with torch.autocast("cpu", torch.bfloat16):
            output = get(select("O1"))(*leaves)
        with torch.autocast("cpu", torch.bfloat16) if is_inside else nullcontext():
            gradients.append(torch.autograd.grad(output.float().square().sum(), leaves))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
