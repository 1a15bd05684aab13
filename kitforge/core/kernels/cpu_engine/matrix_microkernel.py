"""GEMM microkernel for the matrix unit of a processor (AMX): bfloat16 rows by the panels of `gemm_microkernel`.

Its instructions multiply 16 rows of 32 features with 32 features of 16 outputs and keep fp32 sums in tile registers
(Intel's Architecture Instruction Set Extensions, chapter 3). A tile sums even and odd features apart, so an output has
other bits than by the vector instructions, but the same whatever rows are multiplied beside it.
"""

import ctypes
import functools
import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from kitforge.core.kernels.cpu_engine.gemm_microkernel import PAIRS, PANEL, prefetch_line
from kitforge.core.kernels.cpu_engine.numba_runtime import FEATURES, compiled_fastmath, intrinsic, lowering
from kitforge.core.kernels.cpu_engine.vectors import LANES, called, pointer_to

TILE_ROWS = 16
_BYTE = ir.IntType(8)
_PANEL_BYTES, _TILE_BYTES, _SHAPE_BYTES = 4 * PANEL, 4 * LANES, 64
# Registers: input rows and their sums by both halves of a panel, of the last rows and of 16 before them; the panel.
_LAST, _FULL, _WEIGHTS, _NUM_REGISTERS = (0, 1, 2), (3, 4, 5), (6, 7), 8
# arch_prctl of Linux: permission for the state of the tile registers.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


# Code for it can be compiled.
_IS_KNOWN = PAIRS and {"+amx-tile", "+amx-bf16"} <= set(FEATURES)


@functools.cache
def has_matrix_unit() -> bool:
    """Whether this processor has one that this process may use."""
    if not _IS_KNOWN or platform.system() != "Linux":
        return False
    failed: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return not failed


def _shapes() -> bytes:
    """Configurations for 1 to `TILE_ROWS` last rows: palette 1, then bytes of a row and rows of each tile."""
    found = b""
    for last in range(1, TILE_ROWS + 1):
        rows = [last if register in _LAST else TILE_ROWS for register in range(_NUM_REGISTERS)]
        widths = _TILE_BYTES.to_bytes(2, "little") * _NUM_REGISTERS
        found += bytes([1]) + bytes(15) + widths + bytes(16) + bytes(rows) + bytes(8)
    return found


_SHAPES = bytearray(_shapes())


def _instruction(builder: Any, name: str, *operands: Any) -> None:
    """An instruction of the matrix unit, if the processor knows it; an operand that is a whole number is a register."""
    if not _IS_KNOWN:
        return
    arguments = [_BYTE(each) if isinstance(each, int) else each for each in operands]
    called(builder, f"llvm.x86.{name}", ir.VoidType(), arguments)


def generate_tiles(
    num_tiles: int, builder: Any, arguments: Any, fill: Callable[[Any, Any], None] | None = None
) -> None:
    """Code of `multiply_tiles`, for one tile of rows or two. `fill(builder, word)` writes the `LANES` words of the
    panel from that one on; it is called a round before they are multiplied, since tiles wait for what was just
    written. Nothing is prefetched then, and `ahead` is a mask: word n lies at n & mask."""
    rows, row_bytes, panel, num_words, sums, adds, ahead = arguments
    number = rows.type
    width, tiles = number(_PANEL_BYTES), (_FULL, _LAST)[-num_tiles:]
    targets = [
        (register, pointer_to(builder, sums, _BYTE, _PANEL_BYTES * TILE_ROWS * tile + _TILE_BYTES * half))
        for tile, registers in enumerate(tiles)
        for half, register in enumerate(registers[1:])
    ]
    with builder.if_else(builder.icmp_signed("!=", adds, number(0))) as (continues, begins):
        with continues:
            for register, target in targets:
                _instruction(builder, "tileloadd64", register, target, width)
        with begins:
            for register, _ in targets:
                _instruction(builder, "tilezero", register)
    if fill is not None:
        fill(builder, number(0))
    with lowering.for_range_slice(builder, number(0), num_words, number(LANES), number) as (word, _):
        offset = builder.mul(word if fill is None else builder.and_(word, ahead), width)
        if fill is None:
            with builder.if_then(builder.icmp_signed("!=", ahead, panel)):
                for line in range(0, _PANEL_BYTES * LANES, 64):
                    prefetch_line(builder, builder.add(ahead, offset), line)
        else:
            following = builder.add(word, number(LANES))
            with builder.if_then(builder.icmp_signed("<", following, num_words)):
                fill(builder, following)
        for half, register in enumerate(_WEIGHTS):
            weights = pointer_to(builder, builder.add(panel, offset), _BYTE, _TILE_BYTES * half)
            _instruction(builder, "tileloadd64", register, weights, width)
        for tile, (inputs, *results) in enumerate(tiles):
            start = builder.add(rows, builder.mul(row_bytes, number(TILE_ROWS * tile)))
            first = pointer_to(builder, builder.add(start, builder.mul(word, number(4))), _BYTE)
            _instruction(builder, "tileloadd64", inputs, first, row_bytes)
            for result, weight in zip(results, _WEIGHTS, strict=True):
                _instruction(builder, "tdpbf16ps", result, inputs, weight)
    for register, target in targets:
        _instruction(builder, "tilestored64", register, target, width)


def _tiles(num_tiles: int) -> Any:
    def typed(
        _context: Any, _rows: Any, _row_bytes: Any, _panel: Any, _num_words: Any, _sums: Any, _adds: Any, _ahead: Any
    ) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            generate_tiles(num_tiles, builder, arguments)
            return context.get_dummy_value()

        return types.void(*(types.intp for _ in range(7))), generate

    return intrinsic(typed)


_one, _two = _tiles(1), _tiles(2)


@intrinsic
def configure_tiles(_context: Any, _num_last: Any) -> Any:
    """Set the shapes of the registers, of which those of the last rows hold so many, 1 to `TILE_ROWS`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        number = arguments[0].type
        kind = ir.ArrayType(_BYTE, len(_SHAPES))
        table = lowering.global_constant(builder, "tile_shapes", ir.Constant(kind, _SHAPES))
        offset = builder.mul(builder.sub(arguments[0], number(1)), number(_SHAPE_BYTES))
        shape = builder.add(builder.ptrtoint(table, number), offset)
        _instruction(builder, "ldtilecfg", pointer_to(builder, shape, _BYTE))
        return context.get_dummy_value()

    return types.void(types.intp), generate


@compiled_fastmath
def multiply_tiles(
    rows: int, row_bytes: int, num_rows: int, panel: int, num_words: int, sums: int, adds: int, ahead: int
) -> None:
    """See `gemm_microkernel.tile`; any number of rows, in bfloat16. Nothing is prefetched if `ahead` is the panel."""
    configured = 0
    for row in range(0, num_rows, 2 * TILE_ROWS):
        x, y, count = rows + row * row_bytes, sums + _PANEL_BYTES * row, min(num_rows - row, 2 * TILE_ROWS)
        last = count - TILE_ROWS if count > TILE_ROWS else count
        # It takes as long as the products of two tiles.
        if last != configured:
            configure_tiles(last)
            configured = last
        if count > TILE_ROWS:
            _two(x, row_bytes, panel, num_words, y, adds, ahead)
        else:
            _one(x, row_bytes, panel, num_words, y, adds, ahead)
        ahead = panel


@intrinsic
def _release(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        _instruction(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@compiled_fastmath
def release(uses_matrix_unit: bool) -> None:
    """Free the tile registers of this thread, whose contents the system would else save."""
    if uses_matrix_unit:
        _release()
