"""Attention of a prompt, tile by tile, has the bits of its tokens one by one, with and without the matrix unit."""

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from kitforge.core.kernels.cpu_engine.matrix_microkernel import has_matrix_unit, release
from kitforge.core.kernels.cpu_engine.numba_runtime import HALF
from kitforge.core.kernels.decode_attention.numba import Slabs, attend


@njit
def attend_in_tiles(slabs: Any, addresses: Any, num_tokens: int, size: int, memory: int) -> None:
    """A text in bfloat16 from its first token on, `size` tokens at a time."""
    width = slabs.num_heads * slabs.head_dim
    for first in range(0, num_tokens, size):
        tokens = addresses[0] + 4 * width * first, addresses[1] + 2 * width * first
        for kv_head in range(slabs.num_kv_heads):
            attend(HALF, slabs, tokens, 0, first, size, kv_head, 0, np.float32(0.125), memory)
    release(slabs.has_tiles)


@pytest.mark.parametrize("has_tiles", [False, True])
def test_tokens_of_a_prompt_have_the_bits_of_tokens_one_by_one(has_tiles: bool) -> None:
    """Many numbers, since two orders of a sum seldom differ after they are rounded to bfloat16."""
    if has_tiles and not has_matrix_unit():
        pytest.skip("this processor has no matrix unit")
    torch.manual_seed(0)
    num_tokens, heads, kv_heads, dim = 96, 8, 2, 128
    keys, values = torch.randn(2, num_tokens, kv_heads, dim).bfloat16()
    query, slopes = torch.randn(num_tokens, heads, dim), torch.zeros(heads)
    slabs = Slabs(heads, kv_heads, dim, has_tiles, keys.data_ptr(), values.data_ptr(), 0, slopes.data_ptr())
    memory, found = torch.empty(2**20), []
    for size in (1, 16, 96):
        output = torch.empty(num_tokens, heads, dim, dtype=torch.bfloat16)
        addresses = query.data_ptr(), output.data_ptr()
        attend_in_tiles(slabs, addresses, num_tokens, size, (memory.data_ptr() + 63) // 64 * 64)
        found.append(output)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
