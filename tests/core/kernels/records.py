"""Numbers, ids and threads for tests of the loops over rows, and both implementations of each loop."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TABLE_REFERENCE, TableKernels, select_table

FAST: TableKernels = select_table()
KERNELS = {"reference": TABLE_REFERENCE, "fast": FAST}
LOWEST, HIGHEST = -(2**63), 2**63 - 1
EXTREME = [LOWEST, LOWEST + 1, -(2**32), -2, -1, 0, 1, 2**31, 2**53 + 1, HIGHEST - 1, HIGHEST]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def skewed(num_ids: int, seed: int = 0) -> Tensor:
    """Ids all over int64, few of them frequent and most of them rare."""
    ranks = torch.rand(num_ids, generator=seeded(seed), dtype=torch.float64).pow(-1.5).long()
    return ranks * 6364136223846793005


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a buffer may hold that nobody has cleared."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else 10**12, dtype=dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """That many threads, within."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal in type, shape and every bit, but for which NaN a NaN is."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.dtype.is_floating_point:
        return torch.equal(one, other)
    whole = torch.int64 if one.dtype == torch.float64 else torch.int32
    are_nan = one.isnan() & other.isnan()
    return bool((are_nan | (one.contiguous().view(whole) == other.contiguous().view(whole))).all())
