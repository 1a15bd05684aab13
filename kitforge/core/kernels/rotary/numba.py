"""`rotary` of a few tokens in one call, where the overhead of torch's operations exceeds their work."""

from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.cpu_engine.numba_runtime import compiled_fastmath, float32_at


def rotary(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """See `RotaryKernel`; for angles [1, length, pairs] in fp32, on CPU, in fp32 or bfloat16, without gradients."""
    # [batch, length, heads, head_dim], the memory layout of a linear layer's output.
    tokens = input.transpose(1, 2).float().contiguous()
    output = torch.empty_like(tokens)
    angles = cos.contiguous(), sin.contiguous()
    addresses = [each.data_ptr() for each in (tokens, *angles, output)]
    turn: Any = _turn
    turn(*addresses, *tokens.shape, cos.shape[-1], interleaved)
    return output.to(input.dtype).transpose(1, 2)


@compiled_fastmath
def _turn(
    input: int,
    cos: int,
    sin: int,
    output: int,
    batch: int,
    length: int,
    num_heads: int,
    head_dim: int,
    pairs: int,
    interleaved: bool,
) -> None:
    """`rotary` over arrays at these addresses."""
    shape = (batch, length, num_heads, head_dim)
    tokens, turned = float32_at(input, shape), float32_at(output, shape)
    cosines, sines = float32_at(cos, (length, pairs)), float32_at(sin, (length, pairs))
    step, apart = (2, 1) if interleaved else (1, pairs)
    for row in range(batch):
        for token in range(length):
            for head in range(num_heads):
                for pair in range(pairs):
                    x, y = tokens[row, token, head, pair * step], tokens[row, token, head, pair * step + apart]
                    c, s = cosines[token, pair], sines[token, pair]
                    turned[row, token, head, pair * step] = x * c - y * s
                    turned[row, token, head, pair * step + apart] = y * c + x * s
                for k in range(2 * pairs, head_dim):
                    turned[row, token, head, k] = tokens[row, token, head, k]
