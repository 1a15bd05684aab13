"""oneDNN's microkernel for panels in bfloat16, by torch's `brgemm`: the way to the matrix units (AMX) of a processor.

It multiplies the panels of `gemm_microkernel` in place of its tiles, where a measurement finds it much faster. It sums
in an order of its own, which does not depend on the number of rows either, so a process uses one of the two throughout.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import ir
from numba import types

from kitforge.core.kernels.linear.gemm_microkernel import PAIRS, PANEL
from kitforge.core.kernels.numba_runtime import compiled_fastmath, intrinsic

# Names of C++, which hold the types of the arguments: a torch that changed them has no such symbol.
_PRODUCT = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
# Rows of a call: oneDNN compiles a kernel for every number of rows that it sees.
VENDOR_ROWS = 64


class Vendor(NamedTuple):
    """Addresses of functions; 0 where our own tiles are used."""

    product: int
    release: int


NONE = Vendor(0, 0)


@functools.cache
def vendor_functions() -> Vendor:
    """oneDNN's, if this torch and this processor have them."""
    # Without support they raise a C++ exception, which nothing could catch.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", os.environ.get("DNNL_MAX_CPU_ISA", "DEFAULT")).upper()
    is_known = limit in ("DEFAULT", "ALL", "AVX512_CORE_BF16") or "AMX" in limit
    is_supported = PAIRS and is_known and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if not is_supported or not torch.backends.mkldnn.enabled:
        return NONE
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        return Vendor(
            *(ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in (_PRODUCT, _RELEASE))
        )
    except (OSError, AttributeError):
        return NONE


def _function(builder: Any, address: Any, arguments: list[Any]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


@intrinsic
def brgemm(
    _context: Any,
    _function_address: Any,
    _rows: Any,
    _stride: Any,
    _num_rows: Any,
    _panel: Any,
    _features: Any,
    _sums: Any,
    _adds: Any,
) -> Any:
    """`brgemm(function, rows, stride, num_rows, panel, features, sums, adds)`; the stride is in numbers."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        function, rows, stride, num_rows, panel, features, sums, adds = arguments
        byte, width = ir.IntType(8).as_pointer(), features.type(PANEL)
        pointers = [builder.inttoptr(each, byte) for each in (rows, panel, sums)]
        adds = builder.icmp_signed("!=", adds, adds.type(0))
        sizes = [num_rows, width, features, stride, width, width]
        _function(builder, function, [*sizes, adds, *pointers, ir.Constant(ir.IntType(1), 1)])
        return context.get_dummy_value()

    return types.void(*(types.intp for _ in range(8))), generate


@intrinsic
def _release(_context: Any, _address: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _function(builder, arguments[0], [ir.Constant(ir.IntType(1), 1)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


@compiled_fastmath
def release(vendor: Any) -> None:
    """Free the matrix unit of this thread."""
    if vendor[1]:
        _release(vendor[1])
