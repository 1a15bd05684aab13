"""Launches of Triton kernels over rows of tables, which wait for memory far more than they compute.

So many programs that every multiprocessor is full share the rows, and each asks for several rows before it needs one.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kitforge.core.kernels.triton_runtime import device_description, row_block
from kitforge.foundation import device as devices

# For each multiprocessor of a CUDA device; others keep to the programs that their description names.
PROGRAMS = 32
# Elements of a tile: four a thread, whose addresses take most registers.
TILE_ELEMENTS = 512
WARPS = 4
# Rows that a program asks for before it adds the first of them.
UNROLL = 4
# A copy has nothing to compute, so its tiles may be larger.
COPY_ELEMENTS, COPY_WARPS = 1024, 4


def tile_of_rows(device: torch.device, num_rows: int, dim: int) -> tuple[int, int, int]:
    """The power of two that holds a row, the rows of a tile, and the number of tiles."""
    features = row_block(dim)
    rows = max(1, min(TILE_ELEMENTS // features, 32 * WARPS, device_description(device).row_elements // features))
    return features, rows, int(triton.cdiv(num_rows, rows))


def unroll_of(features: int) -> int:
    """The rows that a program asks for at once; the addresses of wide ones would spill registers."""
    return UNROLL if features < 128 else min(UNROLL, 2)


def launch_rows(
    kernel: Any, tiles: int, block: int, *arguments: Any, num_warps: int | None = None, **constants: Any
) -> None:
    """Run a kernel over that many tiles, on the device of its first argument.

    As `triton_runtime.launch_grid`, with more programs: the kernel gets `arguments`, the tiles of one program as
    `steps`, `block` as BLOCK, and the dtype to compute in as EXACT.
    """
    first: torch.Tensor = arguments[0]
    limit = device_description(first.device).num_programs
    if first.is_cuda:
        limit = max(limit, PROGRAMS * devices.num_multiprocessors(first.device))
    programs = max(1, min(tiles, limit))
    with devices.current(first.device):
        kernel[(programs,)](
            *arguments,
            steps=triton.cdiv(tiles, programs),
            BLOCK=block,
            EXACT=tl.float64 if first.dtype == torch.float64 else tl.float32,
            num_warps=num_warps or WARPS,
            **constants,
        )
