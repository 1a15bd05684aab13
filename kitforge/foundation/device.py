"""Where tensors live. The only file that names a vendor's own module; everyone else calls what stands here."""

from __future__ import annotations

import ctypes
import platform
import resource
import sys
from collections.abc import Callable
from functools import cache

import torch

from kitforge.foundation.errors import DeviceError

KINDS = ("cpu", "cuda", "mps", "npu")
# What carries tensors between the ranks of a kind of device.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def available() -> list[str]:
    """The kinds of device that this machine can run on, the best one last."""
    kinds = ["cpu"]
    if torch.backends.mps.is_available():
        kinds.append("mps")
    if torch.cuda.is_available():
        kinds.append("cuda")
    if _npu_available():
        kinds.append("npu")
    return kinds


def pick(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the best one here. Raises DeviceError when it is absent."""
    kind = available()[-1] if name == "auto" else name
    if kind.split(":")[0] not in available():
        raise DeviceError(f"no {kind!r} device here", got=name, expected=" or ".join(["auto", *available()]))
    return torch.device(kind)


def count(kind: str) -> int:
    """Devices of that kind here; a CPU is one, though any number of ranks may share it."""
    return 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def backend(kind: str) -> str:
    """The name by which torch.distributed knows what connects such devices; raises DeviceError where nothing does."""
    if kind not in BACKENDS:
        raise DeviceError(
            f"several ranks cannot run on {kind}", got=kind, expected=" or ".join(BACKENDS), fix="device=cpu"
        )
    return BACKENDS[kind]


def of_rank(name: str, local_rank: int, num_local: int) -> torch.device:
    """The device of one of the `num_local` ranks of this machine. Raises DeviceError where there are too few."""
    device = pick(name)
    backend(device.type)
    if device.type == "cpu":
        return device
    if ":" in name:
        raise DeviceError(
            "several ranks cannot share one device", got=name, expected=f"device={device.type}, one for each rank"
        )
    if num_local > count(device.type):
        raise DeviceError(
            "there are more ranks than devices on this machine",
            got=f"{num_local} ranks, {count(device.type)} of {device.type}",
            expected="a device for each rank",
            fix=f"lower the degrees of parallel.* to {count(device.type)} ranks a machine, or device=cpu",
        )
    return torch.device(device.type, local_rank)


def use(device: torch.device) -> None:
    """Make it the one on which this process works unless it says otherwise."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def can_record(device: torch.device) -> bool:
    """Whether the device can be given a recorded series of kernels at once."""
    return device.type == "cuda"


def recorded(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that does again what `function` does, on the same memory and with the same result tensor, without the
    cost of asking for each kernel; `function` itself where nothing can be recorded."""
    # Tests say that a processor can record, so as to run all around the recording itself.
    if not can_record(device) or device.type != "cuda":
        return function
    # Libraries set themselves up on their first calls, which cannot be recorded.
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function()

    def replay() -> torch.Tensor:
        graph.replay()
        return output

    return replay


def free_memory(device: torch.device) -> int | None:
    """Bytes that the device has left; None where nobody counts them."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def describe(device: torch.device) -> str:
    """A person's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return device.type


def peak_memory(device: torch.device) -> int:
    """Most bytes held so far: of the device, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_memory(device: torch.device, *shape: int) -> torch.Tensor:
    """fp32 memory of the host, its values unset: page-locked where `device` copies faster from such."""
    return torch.empty(shape, pin_memory=device.type == "cuda")


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's own generators, for what draws from them (our own layers do not)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_state` gave; a state of another kind of device is left out."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def set_deterministic(enabled: bool) -> None:
    """Ask torch for bitwise repeatable kernels (always so on CPU; on CUDA they cost speed)."""
    # Torch loads its compiler to note the answer there, for two seconds; what is off already need not be turned off.
    if enabled or torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = not enabled


@cache
def has_native_matmul(dtype: torch.dtype, kind: str = "cpu") -> bool:
    """Whether the device has matrix arithmetic in `dtype`, rather than an emulation that is slower than fp32."""
    if kind == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()


@cache
def keep_malloc_arenas() -> bool:
    """Let the C allocator keep what is freed instead of handing it back to the system at once.

    On Linux a training step frees and asks for the same hundreds of megabytes again; handed back, each page is
    zeroed and mapped anew. Returns whether the allocator took the advice (only glibc has these words).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_max = -1, -4
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def _npu_available() -> bool:
    """Huawei's adapter registers `torch.npu` when it is imported; without it there is no such device."""
    return hasattr(torch, "npu") and bool(torch.npu.is_available())


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
