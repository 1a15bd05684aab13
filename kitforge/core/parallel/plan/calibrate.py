"""Measures what a device reaches by itself: products, attention, functions, a stream, and messages between ranks."""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from kitforge.core.parallel import collectives
from kitforge.core.parallel.plan.step_time import message_turns
from kitforge.foundation import device as devices

# Rows, inputs and outputs of linear layers; rows, heads, length and head dim of attention; bytes of messages.
PRODUCTS = ((64, 64, 128), (128, 128, 256), (256, 256, 512), (512, 512, 1024), (1024, 1024, 2048))
LARGE_PRODUCTS = ((4096, 4096, 4096), (8192, 4096, 14336))
ATTENTION = ((4, 4, 64, 32), (8, 4, 256, 32), (8, 8, 512, 64))
MESSAGES, MESSAGE_RUNS = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24), 20
# Tensors that are read in turn, so that none of them is in a cache, and their elements.
POOL, ELEMENTS = 24, 2**20
# Seconds for which each is measured.
BUDGET = 0.4


def seconds_of(function: Callable[[], Any], device: torch.device, budget: float | None = None) -> float:
    """The lower quartile of the times of a call over `budget` seconds: what else runs on the machine makes some of them
    longer."""
    times, end = list[float](), time.perf_counter() + (BUDGET if budget is None else budget)
    for _ in range(3):
        function()
    while len(times) < 5 or time.perf_counter() < end:
        times.append(_once(function, device))
    return statistics.quantiles(times, n=4)[0]


def measured_device(device: torch.device) -> dict[str, Any]:
    """The figures of a `Speed` that one device has without a network."""
    devices.keep_malloc_arenas()
    shapes = PRODUCTS if device.type == "cpu" else (*PRODUCTS, *LARGE_PRODUCTS)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    kinds = {name: dtype for name, dtype in kinds.items() if devices.has_native_matmul(dtype, device.type)}
    rates = {name: [_product(shape, dtype, device) for shape in shapes] for name, dtype in kinds.items()}
    peaks = {name: max(rate for _, rate in each) for name, each in rates.items()}
    rates |= {f"attention {name}": [_attention(each, kinds[name], device) for each in ATTENTION] for name in kinds}
    pool = itertools.cycle([torch.rand(ELEMENTS // 512, 512, device=device) for _ in range(POOL)])
    stream = seconds_of(lambda: next(pool) * next(pool), device)
    gelu = seconds_of(lambda: functional.gelu(next(pool), approximate="tanh"), device)
    backward = partial(torch.ops.aten.gelu_backward, approximate="tanh")
    gelu += seconds_of(lambda: backward(next(pool), next(pool)), device)
    return {
        "peak_tflops": {name: peak / 1e3 for name, peak in peaks.items()},
        "memory_gb_per_s": 3 * 4 * ELEMENTS / stream / 1e9,
        "functions_g_per_s": 2 * ELEMENTS / gelu / 1e9,
        "product_fraction": {
            name: [[size, rate / peaks[name.split()[-1]]] for size, rate in sorted(each)]
            for name, each in rates.items()
        },
    }


def _product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """GFLOP of a product, and GFLOP/s of the three of a linear layer and its gradients."""
    rows, inner, width = shape
    left, right = (torch.rand(size, inner, dtype=dtype, device=device) for size in (rows, width))
    gradient = torch.rand(rows, width, dtype=dtype, device=device)

    def products() -> list[Tensor]:
        return [left @ right.t(), gradient @ right, gradient.t() @ left]

    size = 2 * rows * inner * width / 1e9
    return size, 3 * size / seconds_of(products, device)


def _attention(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """GFLOP of fused attention, and GFLOP/s of both its passes."""
    query = torch.rand(*shape, dtype=dtype, device=device, requires_grad=True)
    gradient, size = torch.rand_like(query), 4 * query.numel() * shape[2] / 1e9

    def passes() -> None:
        torch.autograd.backward(functional.scaled_dot_product_attention(query, query, query), gradient)

    return size, 3.5 * size / seconds_of(passes, device)


def measured_link(group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Latency and bandwidth of messages between the ranks of a group, by kind. Products stand between them, as in a
    step: a rank that has just computed lets the other one wait, and finds its memory cold."""
    ranks, fits = collectives.group_size(group), dict[str, list[float]]()
    work = torch.rand(512, 512, device=device)
    runs: dict[str, Callable[[Tensor], Any]] = {
        "all_reduce": lambda whole: collectives.all_reduce_(whole, group),
        "all_gather": lambda whole: collectives.all_gather(whole[: len(whole) // ranks], group, 0),
        "reduce_scatter": lambda whole: collectives.reduce_scatter(whole, group, 0),
        "all_to_all": lambda whole: collectives.exchange(whole.view(ranks, -1), group, 0, 1),
    }
    for kind, run in runs.items():
        turns, part = message_turns(kind, ranks)
        rows = []
        for size in MESSAGES:
            pool = itertools.cycle([torch.rand(size // 4 // ranks * ranks, device=device) for _ in range(POOL)])
            times = []
            # All ranks measure as often.
            for _ in range(MESSAGE_RUNS):
                _ = work @ work
                times.append(_once(partial(run, next(pool)), device))
            seconds = statistics.median(times)
            rows.append([turns * 1e-6 / seconds, part * size / 1e9 / seconds])
        found = torch.linalg.lstsq(torch.tensor(rows), torch.ones(len(rows), 1)).solution.flatten().clamp(min=1e-3)
        fits[kind] = [float(found[0]), 1 / float(found[1])]
    latency, bandwidth = fits["all_reduce"]
    return {"link_latency_us": latency, "link_gb_per_s": bandwidth, "link_by_kind": fits}


def _once(function: Callable[[], Any], device: torch.device) -> float:
    devices.synchronize(device)
    start = time.perf_counter()
    function()
    devices.synchronize(device)
    return time.perf_counter() - start
