"""Open addressing with linear probing in Triton: what `unique` and `hash_map` share."""

import torch
import triton
import triton.language as tl

from kitforge.core.kernels.triton.runtime import device_description, quotient_up

SMALLEST_TABLE = 64
# Cells behind a table. Compare and swap has no mask, so a lane without work swaps one of these, each its own: many on
# one address would wait for one another.
SPARE_CELLS = 4096
# Keys of a tile, one a lane: the lanes wait for the longest probe among them.
KEYS, KEY_WARPS = 128, 4


def table_size(num_keys: int) -> int:
    """The power of two of which that many keys fill at most half."""
    return max(SMALLEST_TABLE, 1 << max(2 * num_keys - 1, 0).bit_length())


def key_tiles(device: torch.device, num_keys: int) -> tuple[int, int]:
    """Of a kernel over keys: the number of tiles, and the keys of a tile."""
    block = min(device_description(device).tile_elements, KEYS)
    return quotient_up(num_keys, block), block


@triton.jit
def first_cell(key, mask):
    """Where the probe of a key begins: the highest bits of a product (Knuth, 1973, section 6.4)."""
    bits = key.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    return ((bits >> 32) ^ (bits >> 20)).to(tl.int64) & mask
