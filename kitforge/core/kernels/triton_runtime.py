"""What the Triton kernels share: the description of a device, tiles, grids, and the arithmetic dtype.

One source serves CUDA and Ascend: grids have one dimension, a program takes every n-th tile, and tiles are powers of
two with masks. With TRITON_INTERPRET=1 the kernels run on CPU tensors, as in the tests. The first call with a tensor on
an accelerator imports this module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.foundation import device as devices


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """What tiles and grids are chosen by."""

    num_programs: int  # programs that run at once: several for each multiprocessor, or one for each core of Ascend
    tile_elements: int  # elements of a tile of an elementwise kernel
    row_elements: int  # of one whose rows have addresses of 64 bits; more spill registers


# An Ascend core has 192 KiB for all the buffers of a program. Never run on that hardware.
_NPU = DeviceDescription(num_programs=40, tile_elements=2048, row_elements=512)
_INTERPRETED = DeviceDescription(num_programs=3, tile_elements=64, row_elements=64)


@functools.cache
def device_description(device: torch.device) -> DeviceDescription:
    """The description of a device; of a CPU, that of the interpreter."""
    if device.type == "npu":
        return _NPU
    if device.type != "cuda":
        return _INTERPRETED
    programs = 8 * devices.num_multiprocessors(device)
    return DeviceDescription(num_programs=programs, tile_elements=4096, row_elements=1024)


def row_block(dim: int) -> int:
    """The power of two that holds a row."""
    return int(triton.next_power_of_2(max(dim, 1)))


def grid(device: torch.device, num_tiles: int, *, is_queued: bool = False) -> tuple[int]:
    """As many programs as run at once, each of which takes every n-th tile; with `is_queued` a program for each tile,
    where the hardware starts the next one as soon as one ends."""
    most = num_tiles if is_queued and device.type == "cuda" else device_description(device).num_programs
    return (max(1, min(num_tiles, most)),)


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor as rows [n, dim] with adjacent columns: a view where the strides allow it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def logits_tiles(logits: Tensor) -> tuple[int, int]:
    """A program takes a row of logits at a time, block by block: the number of rows, and the elements of a block."""
    rows, width = logits.shape
    return rows, min(row_block(width), device_description(logits.device).tile_elements)


def row_tiles(device: torch.device, num_rows: int, dim: int) -> tuple[int, int, int]:
    """Of a kernel over rows of a table: the power of two that holds a row, the rows of a tile, and the tiles."""
    features = row_block(dim)
    rows = max(1, device_description(device).row_elements // features)
    return features, rows, int(triton.cdiv(num_rows, rows))


def launch_grid(
    kernel: Any,
    tiles: int,
    block: int,
    *arguments: Any,
    num_warps: int | None = None,
    is_queued: bool = False,
    **constants: Any,
) -> None:
    """Run a kernel over that many tiles, on the device of its first argument.

    The kernel gets `arguments`, the tiles of one program as `steps`, the elements of a tile as BLOCK, and the dtype to
    compute in as EXACT: fp32, or float64 where the first argument has it.
    """
    first: Tensor = arguments[0]
    programs = grid(first.device, tiles, is_queued=is_queued)
    # A kernel runs on the current device, which need not be that of its tensors.
    with devices.current(first.device):
        kernel[programs](
            *arguments,
            steps=triton.cdiv(tiles, programs[0]),
            BLOCK=block,
            EXACT=tl.float64 if first.dtype == torch.float64 else tl.float32,
            num_warps=num_warps or min(max(block // 256, 1), 16),
            **constants,
        )
