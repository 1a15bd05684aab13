"""Processors with and without half-precision arithmetic, on whatever processor there is."""

from collections.abc import Iterator

import pytest
import torch

from kitforge.core.kernels.autograd import mixed_precision


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=[True, False], ids=["native_half", "stored_half"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the processor says that it multiplies bfloat16 itself; torch emulates it where that is not so."""
    monkeypatch.setitem(mixed_precision.NATIVE_DTYPES, torch.bfloat16, request.param)
    return bool(request.param)
