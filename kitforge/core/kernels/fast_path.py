"""What a compiled loop on one thread may read, and what it reads sooner than torch's single operations."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements that are soon done with: waking a second thread for them, or calling another operation, would take longer.
MAX_SMALL_ELEMENTS = 2**15


def is_numba_eligible(tensor: Tensor) -> bool:
    """Whether it is on CPU, in fp32 or bfloat16, and nobody wants a gradient."""
    return tensor.is_cpu and tensor.dtype in (torch.float32, torch.bfloat16) and not torch.is_grad_enabled()


def is_small_and_eligible(tensor: Tensor) -> bool:
    """Whether it is plain and has few elements."""
    return tensor.numel() <= MAX_SMALL_ELEMENTS and is_numba_eligible(tensor)
