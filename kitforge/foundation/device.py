"""Devices: selection, memory, random state, CUDA graphs. The only file that calls torch.cuda or torch.npu."""

import ctypes
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from kitforge.foundation.errors import DeviceError

KINDS = ("cpu", "cuda", "mps", "npu")
_NO_CONTEXT = nullcontext()
# The torch.distributed backend of each kind of device.
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def available() -> list[str]:
    """The available kinds of device, the best one last."""
    # Huawei's adapter registers `torch.npu` when it is imported.
    has_npu = hasattr(torch, "npu") and bool(torch.npu.is_available())
    kinds = ["cpu"]
    if torch.backends.mps.is_available():
        kinds.append("mps")
    if torch.cuda.is_available():
        kinds.append("cuda")
    if has_npu:
        kinds.append("npu")
    return kinds


def pick(name: str = "auto") -> torch.device:
    """The device `name`; "auto" is the best available one. Raises DeviceError if it is absent."""
    kind = available()[-1] if name == "auto" else name
    if kind.split(":")[0] not in available():
        fix = "leave device out, or install the build of torch for it (NVIDIA and AMD GPUs are 'cuda')"
        raise DeviceError(f"no {kind!r} device here", got=name, expected=" or ".join(["auto", *available()]), fix=fix)
    return torch.device(kind)


def count(kind: str) -> int:
    """The number of devices of that kind; CPUs count as one."""
    return 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def backend(kind: str) -> str:
    """The torch.distributed backend of a kind of device. Raises DeviceError if it has none."""
    if kind not in BACKENDS:
        raise DeviceError(
            f"several ranks cannot run on {kind}", got=kind, expected=" or ".join(BACKENDS), fix="device=cpu"
        )
    return BACKENDS[kind]


def of_rank(name: str, local_rank: int, num_local: int) -> torch.device:
    """The device of a local rank. Raises DeviceError if there are fewer devices than local ranks."""
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
    """Make `device` the default accelerator of this process."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Within the context, kernels are launched on that device; on CPU it does nothing."""
    # To enter the device that is current already takes longer than to ask.
    if device.type not in ("cuda", "npu") or device.type == "cuda" and device.index == torch.cuda.current_device():
        return _NO_CONTEXT
    switch: AbstractContextManager[Any] = getattr(torch, device.type).device(device)
    return switch


def num_multiprocessors(device: torch.device) -> int:
    """The streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """That of a GPU, as (9, 0) of an H200."""
    return torch.cuda.get_device_capability(device)


def synchronize(device: torch.device) -> None:
    """Wait until all queued work of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def can_record(device: torch.device) -> bool:
    """Whether the device supports CUDA graphs."""
    return device.type == "cuda"


def recorded(function: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """A function that replays `function` as a CUDA graph, on the same memory and the same result tensor. Without CUDA
    graphs, `function` itself."""
    # Tests patch `can_record` to run the code around the capture on a CPU.
    if not can_record(device) or device.type != "cuda":
        return function
    # Libraries initialize themselves on their first calls, which cannot be captured.
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
    """Free bytes of the device; None if unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def total_memory(device: torch.device) -> int | None:
    """Bytes of a device's own memory; None if this is not known."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def free_host_memory() -> int:
    """Bytes that processes may still take on the host, within the limit of this control group; 0 if unknown."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(facts["MemAvailable"].split()[0])
    except (OSError, KeyError):
        return 0
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):
        # Without a limit the file says "max".
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used)
    return free


def describe(device: torch.device) -> str:
    """The name of the device for messages."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return device.type


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of the device, or of this process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_memory(device: torch.device, *shape: int) -> torch.Tensor:
    """Uninitialized fp32 host memory, pinned if `device` is CUDA."""
    return torch.empty(shape, pin_memory=device.type == "cuda")


def copy_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on that device. A copy from the CPU to CUDA is made through pinned memory and nothing waits for it."""
    if tensor.device == device:
        return tensor
    if device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned():
        # torch's pinned allocator keeps the memory until the copy, which it records, is done.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type == "cuda" and tensor.is_cpu)


class CopyStream:
    """A stream of a CUDA device for copies from and to the CPU, beside the one that computes. Elsewhere it does
    nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A stream needs no memory of the device before its first use.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Whether computation waits for all copies that have been queued.
        self.is_idle = True

    def copying(self, after: Any = None) -> AbstractContextManager[Any]:
        """What is queued within runs after all that computation has queued so far, or after what `queued` returned, and
        beside what computation queues next."""
        return _NO_CONTEXT if self._stream is None else self._queueing(self._stream, after)

    @contextmanager
    def _queueing(self, stream: Any, after: Any) -> Iterator[None]:
        if after is None:
            stream.wait_stream(torch.cuda.default_stream(self._device))
        else:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                self.is_idle = False

    def wait(self) -> None:
        """Let computation that is queued from now on wait for the copies that have been queued. The CPU does not."""
        if self._stream is not None:
            # Before the wait: what another thread queues after it is not idle again.
            self.is_idle = True
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def queued(device: torch.device) -> Any:
    """An event after all that this thread has queued on the current stream of a CUDA device; None elsewhere, where
    nothing is queued."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def wait_for(event: Any) -> None:
    """Let computation that this thread queues from now on wait for an event of `queued`. The CPU does not."""
    if event is not None:
        event.wait()


def synchronize_event(event: Any) -> None:
    """Wait for an event of `queued`."""
    if event is not None:
        event.synchronize()


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The state of torch's global generators (our own layers do not use them)."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the result of `random_state`; states of other kinds of device are ignored."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def set_deterministic(enabled: bool) -> None:
    """Select deterministic kernels (CPU kernels always are; on CUDA they cost speed)."""
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(enabled)
    else:
        # The same, but it does not import the compiler, which takes three seconds; compiled blocks ask what is set.
        torch.set_deterministic_debug_mode("error" if enabled else "default")
    torch.backends.cudnn.benchmark = not enabled


@cache
def has_native_matmul(dtype: torch.dtype, kind: str = "cpu") -> bool:
    """Whether the device multiplies matrices in `dtype` natively. Emulation is slower than fp32."""
    if kind == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    if kind != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return True
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.cpu._is_amx_fp16_supported()


def check_float8(device: torch.device) -> None:
    """Raises DeviceError for a device without FP8 matrix products. A CPU has slow ones."""
    if device.type == "cuda":
        capability = compute_capability(device)
        is_able, got = capability >= (8, 9), f"{describe(device)}, compute capability {capability[0]}.{capability[1]}"
    else:
        is_able, got = device.type == "cpu", device.type
    if not is_able:
        raise DeviceError(
            "precision=fp8 needs FP8 matrix units", got=got, expected="compute capability 8.9", fix="precision=bf16"
        )


@cache
def keep_malloc_arenas() -> bool:
    """Let the C allocator keep freed memory instead of returning it to the system.

    A training step frees and allocates the same hundreds of megabytes again; returned pages are zeroed and mapped anew.
    Returns whether the allocator accepted the setting (glibc on Linux only).
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_max = -1, -4
    return bool(mallopt(mmap_max, 0)) and bool(mallopt(trim_threshold, 2**31 - 1))


def _bound_product_caches() -> None:
    """Let torch and oneDNN keep 64 bf16 products that are compiled for their shapes, 0.5 MB each, instead of 1,024.

    Rows of different lengths are new shapes in every step, and what is kept of them lies in the holes of large freed
    blocks, so that the next ones need new memory. Both read this at the first product; a user's value stays.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, "64")


_bound_product_caches()


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
