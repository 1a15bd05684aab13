"""Programmatic dependent launch, of Hopper and later: a kernel begins while the one before it ends.

A kernel may read what no kernel writes, as weights, before `await_last`, and everything else behind it. Each kernel of
a chain calls it in every program, so that one that has waited sees what all before it wrote.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

from kitforge.foundation import device as devices


@functools.cache
def dependent_launch(device: torch.device) -> dict[str, Any]:
    """The options of a launch of a kernel with the constant PDL: whether device and Triton have it."""
    has_it = device.type == "cuda" and devices.compute_capability(device) >= (9, 0) and hasattr(cuda, "gdc_wait")
    return {"PDL": True, "launch_pdl": True} if has_it else {"PDL": False}


@triton.jit
def await_last(PDL: tl.constexpr):
    """Wait until the kernel before this one is done, and let the next one begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
