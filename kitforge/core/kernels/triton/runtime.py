"""What the Triton kernels share: the description of a device, tiles, grids, and the arithmetic dtype.

One source serves CUDA and Ascend: grids have one dimension, a program takes every n-th tile, and tiles are powers of
two with masks. With TRITON_INTERPRET=1 the kernels run on CPU tensors, as in the tests. The first call with a tensor on
an accelerator imports this module.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.triton.launcher import RepeatedLaunch, launch_programs
from kitforge.foundation import device as devices

# Dtypes and devices of tensors.
Kinds = tuple[tuple[torch.dtype, torch.device], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDescription:
    """What tiles and grids are chosen by."""

    num_programs: int  # programs that run at once: several for each multiprocessor, or one for each core of Ascend
    tile_elements: int  # elements of a tile of an elementwise kernel
    num_multiprocessors: int = 0  # of CUDA
    row_elements: int  # of one whose rows have addresses of 64 bits; more spill registers


# An Ascend core has 192 KiB for all the buffers of a program. Never run on that hardware.
_NPU = DeviceDescription(num_programs=40, tile_elements=2048, row_elements=512)


@functools.cache
def device_description(device: torch.device) -> DeviceDescription:
    """The description of a device; of a CPU, that of the interpreter."""
    if device.type == "npu":
        return _NPU
    if device.type != "cuda":
        return DeviceDescription(num_programs=3, tile_elements=64, row_elements=64)
    return cuda_description(devices.num_multiprocessors(device))


def cuda_description(multiprocessors: int) -> DeviceDescription:
    """That of a GPU with so many multiprocessors."""
    return DeviceDescription(
        num_programs=8 * multiprocessors, num_multiprocessors=multiprocessors, tile_elements=4096, row_elements=1024
    )


def row_block(dim: int) -> int:
    """The power of two that holds a row."""
    return 1 << (max(dim, 1) - 1).bit_length()


def quotient_up(number: int, divisor: int) -> int:
    """The quotient, rounded up; `triton.cdiv` takes as long as an allocation."""
    return -(-number // divisor)


def grid(device: torch.device, num_tiles: int) -> tuple[int]:
    """As many programs as run at once, each of which takes every n-th tile."""
    return (max(1, min(num_tiles, device_description(device).num_programs)),)


def rows_of(tensor: Tensor) -> Tensor:
    """The tensor as rows [n, dim] with adjacent columns: a view where the strides allow it."""
    rows = tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.shape[-1] <= 1 or rows.stride(-1) == 1 else rows.contiguous()


def logits_tiles(logits: Tensor) -> tuple[int, int]:
    """A program takes a row of logits at a time, block by block: the number of rows, and the elements of a block."""
    rows, width = logits.shape
    return rows, min(row_block(width), device_description(logits.device).tile_elements)


def row_tiles(device: torch.device, num_rows: int, dim: int) -> tuple[int, int, int]:
    """Of a kernel over rows of a table: the power of two that holds a row, the rows of a tile, and the tiles."""
    features = row_block(dim)
    rows = max(1, device_description(device).row_elements // features)
    return features, rows, quotient_up(num_rows, rows)


def row_programs(
    device: torch.device, num_rows: int, features: int, *, tile: int, per_thread: int, warps: int
) -> tuple[int, int, int]:
    """Of a kernel that holds whole rows: the rows of a tile, the warps of a program, and how many programs run at once.

    Tiles have `tile` elements, or one row, and threads `per_thread`; a multiprocessor runs `warps` warps.
    """
    description = device_description(device)
    if not description.num_multiprocessors:
        return max(1, description.row_elements // features), 4, description.num_programs
    rows = min(max(1, tile // features), row_block(num_rows))
    num_warps = min(max(rows * features // (32 * per_thread), 1), 16)
    return rows, num_warps, description.num_multiprocessors * max(1, warps // num_warps)


def launch_grid(
    kernel: Any,
    tiles: int,
    block: int,
    *arguments: Any,
    num_warps: int | None = None,
    programs: int | None = None,
    is_queued: bool = False,
    **constants: Any,
) -> None:
    """Run a kernel over that many tiles, on the device of its first argument.

    The kernel gets `arguments`, the tiles of one program as `steps`, the elements of a tile as BLOCK, and the dtype to
    compute in as EXACT: fp32, or float64 where the first argument has it. There are at most `programs` programs;
    with `is_queued` one for each tile on a GPU, which starts the next one as soon as one ends.
    """
    device = arguments[0].device
    count, steps = _spread(device, tiles, programs, is_queued)
    options = dict(**constants, BLOCK=block)
    launch_programs(kernel, count, (*arguments, steps), num_warps=num_warps or _warps(block), constants=options)


def repeated_launch(
    kernel: Any,
    tiles: int,
    block: int,
    *numbers: Any,
    device: torch.device,
    num_warps: int | None = None,
    programs: int | None = None,
    is_queued: bool = False,
    **constants: Any,
) -> RepeatedLaunch:
    """A call of it with tensors is `launch_grid` with those tensors before `numbers`. To be kept for calls with the
    same numbers, constants, and `kinds_of` tensors."""
    count, steps = _spread(device, tiles, programs, is_queued)
    options = dict(**constants, BLOCK=block)
    return RepeatedLaunch(kernel, count, (*numbers, steps), num_warps=num_warps or _warps(block), constants=options)


def kinds_of(*tensors: Tensor | None) -> Kinds:
    """Of each tensor that is given: what machine code depends on, other than its address."""
    return tuple([(each.dtype, each.device) for each in tensors if each is not None])


def _spread(device: torch.device, tiles: int, programs: int | None, is_queued: bool) -> tuple[int, int]:
    """The number of programs, and the tiles of one."""
    most = tiles if is_queued and device.type == "cuda" else programs or device_description(device).num_programs
    count = max(1, min(tiles, most))
    return count, -(-tiles // count)


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)
