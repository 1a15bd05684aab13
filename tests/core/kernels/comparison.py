"""How far a kernel is from its reference, in outputs and gradients, over memory that nobody has cleared."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from kitforge.core.kernels.linear_cross_entropy.vocabulary import VocabularyShard
from tests.patience import PATIENCE

Call = Callable[..., Tensor]
Found = TypeVar("Found")
# What rounding alone may do, relative to the largest element.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Standard normal numbers that depend on nothing but the arguments."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def poison(largest: int = 18) -> None:
    """Fill memory with NaN and free it, so that a kernel which reads what it did not write is found out; blocks have
    up to 2**`largest` numbers."""
    blocks = [torch.full((2**power,), float("nan")) for power in range(4, largest + 1) for _ in range(4)]
    del blocks


def results(
    call: Call, inputs: Sequence[Tensor], *, has_gradient: bool = True, upstream: Callable[..., Tensor] = random
) -> list[Tensor]:
    """The output and the gradient of every input, for a random gradient of the output. Inputs must stay as they are."""
    leaves = [each.detach().clone().requires_grad_(has_gradient) for each in inputs]
    poison(13)
    output = call(*leaves)
    assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(leaves, inputs, strict=True))
    if not has_gradient:
        return [output]
    gradient = upstream(*output.shape, dtype=output.dtype, seed=99)
    poison(13)
    gradients = torch.autograd.grad(output, leaves, gradient)
    assert all(torch.equal(*map(torch.nan_to_num, pair)) for pair in zip(leaves, inputs, strict=True))
    assert all(found.dtype == each.dtype for found, each in zip(gradients, inputs, strict=True))
    return [output.detach(), *gradients]


def autocast(call: Call) -> Call:
    """The call, and not its backward pass, under bfloat16 autocast."""

    def under_autocast(*inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(*inputs)

    return under_autocast


def distance(kernel: Call, reference: Call, inputs: Sequence[Tensor]) -> float:
    """The largest difference of any result, relative to the largest element of the reference's (or to one: a gradient
    that is zero but for rounding has no scale of its own)."""
    pairs = list(zip(results(kernel, inputs), results(reference, inputs), strict=True))
    assert all(got.shape == wanted.shape for got, wanted in pairs)
    return max(relative(got, wanted, floor=1.0) for got, wanted in pairs)


def relative(got: Tensor, wanted: Tensor, floor: float = 1e-30) -> float:
    """The largest difference relative to the largest element; NaN counts as infinitely far."""
    if wanted.numel() == 0:
        return 0.0
    difference = (got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=floor)
    return float(difference.nan_to_num(float("inf")))


def in_parts(sizes: Sequence[int], weight: Tensor, held: Callable[[Tensor, VocabularyShard], Found]) -> list[Found]:
    """What `held` finds for each part of a vocabulary [vocab, dim], by holders that meet whenever they exchange."""
    told: list[Tensor] = [torch.empty(0)] * len(sizes)
    meet = threading.Barrier(len(sizes), timeout=PATIENCE)

    def gathered(number: int, values: Tensor) -> Tensor:
        told[number] = values
        meet.wait()
        found = torch.stack(told)
        meet.wait()
        return found

    def hold(number: int, first: int) -> Found:
        share = VocabularyShard(first=first, max_rows=max(sizes), gather=partial(gathered, number))
        own = weight[first : first + sizes[number]].detach().clone().requires_grad_()
        try:
            return held(own, share)
        except BaseException:
            meet.abort()
            raise

    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(hold, range(len(sizes)), starts))
