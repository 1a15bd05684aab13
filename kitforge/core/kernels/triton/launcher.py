"""Launches of Triton kernels that look up the machine code by a key of our own.

`kernel[grid](...)` binds all arguments by name, describes each, and writes the descriptions and the options as text, by
which it finds the machine code: that takes the host longer than the launch. Here the key is a tuple of all that those
descriptions depend on. The first launch with a key is Triton's; its machine code is kept, and later ones call the entry
that Triton calls. Triton makes every launch itself on a device that is not current or no GPU, in versions that are not
known, in the interpreter, and while a hook watches launches.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kitforge.foundation import device as devices

# Versions whose descriptions of arguments and whose entry are those below.
_IS_KNOWN = (3, 6) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
if _IS_KNOWN:
    from triton.compiler import CompiledKernel
    from triton.knobs import runtime
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction


class _Kept(NamedTuple):
    """Machine code on a device."""

    run: Any  # the entry
    device_index: int
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_kept: dict[tuple[Any, ...], _Kept] = {}


def launch_programs(
    kernel: Any, programs: int, arguments: tuple[Any, ...], *, num_warps: int, constants: dict[str, Any]
) -> _Kept | None:
    """Run so many programs of a kernel, on the device of its first argument.

    The first parameters of the kernel are `arguments`. It gets `constants`, with Triton's options, by name, and the
    dtype to compute in as EXACT: fp32, or float64 where the first argument has it. Returns the machine code if it is
    kept.
    """
    first: Tensor = arguments[0]
    device, key = first.device, None
    if device.type == "cuda" and _is_plain(kernel) and driver.active.get_current_device() == device.index:
        kinds, values = specialization(arguments)
        # Not the kernel, whose hash is that of its source.
        key = (kernel.fn, device.index, num_warps, tuple(constants.items()), *kinds)
        found = _kept.get(key)
        if found is not None:
            run, index, function, metadata, trailing = found
            stream = driver.active.get_current_stream(index)
            run(programs, 1, 1, stream, function, metadata, None, None, None, *values, *trailing)
            return found
    options = {**constants, "EXACT": tl.float64 if first.dtype == torch.float64 else tl.float32}
    # A kernel runs on the current device, which need not be that of its tensors.
    with devices.current(device):
        compiled = kernel[programs,](*arguments, num_warps=num_warps, **options)
    return None if key is None else _keep(key, kernel, arguments, options, compiled)


class RepeatedLaunch:
    """Launches of a kernel over tensors that have the same dtypes and devices each time, with the same numbers behind
    them and the same constants."""

    def __init__(
        self, kernel: Any, programs: int, numbers: tuple[Any, ...], *, num_warps: int, constants: dict[str, Any]
    ) -> None:
        self._kernel, self._programs, self._numbers = kernel, programs, numbers
        self._num_warps, self._constants = num_warps, constants
        # That for tensors with aligned addresses; others are looked up each time.
        self._kept: _Kept | None = None
        self._trailing: tuple[Any, ...] = ()

    def __call__(self, *tensors: Tensor) -> None:
        addresses = [each.data_ptr() for each in tensors]
        is_aligned = not any([each & 15 for each in addresses])
        if self._kept is not None and is_aligned and _is_plain(self._kernel):
            run, index, function, metadata, _ = self._kept
            active = driver.active
            if active.get_current_device() == index:
                stream = active.get_current_stream(index)
                run(self._programs, 1, 1, stream, function, metadata, None, None, None, *addresses, *self._trailing)
                return
        given = (*tensors, *self._numbers)
        found = launch_programs(
            self._kernel, self._programs, given, num_warps=self._num_warps, constants=self._constants
        )
        if found is not None and is_aligned:
            self._trailing = *self._numbers, *found.constants
            self._kept = found


def specialization(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
    """What the machine code depends on, for all arguments one after another, and what the entry takes for each.

    Triton makes a constant of a 1, knows whether 16 divides other integers and addresses, and takes integers in 32 or
    64 bits. Given an address, the entry does not ask the driver whether the GPU has it.
    """
    kinds: list[Any] = []
    values: list[Any] = []
    for each in arguments:
        kind, value = type(each), each
        if kind is int:
            if -(2**31) <= each < 2**31:
                kinds.append("1" if each == 1 else not each & 15)
            else:
                kinds.append((each >> 63, not each & 15))
        elif kind is float:
            kinds.append(float)
        elif isinstance(each, Tensor):
            value = each.data_ptr()
            kinds += each.dtype, each.is_cuda, not value & 15
        else:
            kinds.append((kind, each))
        values.append(value)
    return kinds, values


def _is_plain(kernel: Any) -> bool:
    """Whether all that Triton does with a launch is known, and nothing is called at each."""
    if not _IS_KNOWN or type(kernel) is not JITFunction or kernel.pre_run_hooks:
        return False
    entered, left = runtime.launch_enter_hook, runtime.launch_exit_hook
    return not (getattr(entered, "calls", entered) or getattr(left, "calls", left))


def _keep(
    key: tuple[Any, ...], kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], compiled: Any
) -> _Kept | None:
    """Keep the machine code of a launch, if another one with its key may do without Triton."""
    on_gpu = all(each.is_cuda for each in arguments if isinstance(each, Tensor))
    if not (on_gpu and isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda"):
        return None
    trailing = kernel.params[len(arguments) :]
    if not all(each.is_constexpr and each.name in constants for each in trailing):
        return None
    values = tuple(constants[each.name] for each in trailing)
    index = arguments[0].device.index
    _kept[key] = _Kept(compiled.run, index, compiled.function, compiled.packed_metadata, values)
    return _kept[key]
