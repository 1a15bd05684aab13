"""Launches of Triton kernels over rows of tables, which wait for memory far more than they compute.

So many programs that every multiprocessor is full share the rows, and each asks for several rows before it needs one.
"""

from typing import Any

import torch

from kitforge.core.kernels.triton.runtime import device_description, launch_grid, quotient_up, row_block

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
    return features, rows, quotient_up(num_rows, rows)


def unroll_of(features: int) -> int:
    """The rows that a program asks for at once; the addresses of wide ones would spill registers."""
    return UNROLL if features < 128 else min(UNROLL, 2)


def launch_rows(
    kernel: Any, tiles: int, block: int, *arguments: Any, num_warps: int | None = None, **constants: Any
) -> None:
    """`triton.runtime.launch_grid` with more programs."""
    device = device_description(arguments[0].device)
    programs = max(device.num_programs, PROGRAMS * device.num_multiprocessors)
    launch_grid(kernel, tiles, block, *arguments, num_warps=num_warps or WARPS, programs=programs, **constants)
