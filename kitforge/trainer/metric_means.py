"""Evaluation that does not depend on the batch size: sums over all batches, divided once."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from kitforge.foundation.types import Sums

Batch = TypeVar("Batch")


def weighted_means(
    batches: Iterable[Batch],
    sums: Callable[[Batch], Sums],
    counts: Callable[[Batch], Sums],
    all_reduce: Callable[[Mapping[str, Tensor]], Sums] = dict,
) -> dict[str, float]:
    """Sum of sums / sum of counts by name, in float64; NaN for a count of 0. A sum without a count of its own is over
    the count of "loss". `all_reduce` sums over ranks."""
    totals: dict[str, float] = {}
    divisors: dict[str, float] = {}
    for batch in batches:
        for name, value in sums(batch).items():
            totals[name] = totals.get(name, 0.0) + float(value)
        for name, value in counts(batch).items():
            divisors[name] = divisors.get(name, 0.0) + float(value)
    totals, divisors = _all_reduced(totals, all_reduce), _all_reduced(divisors, all_reduce)
    return {name: total / (divisors.get(name, divisors["loss"]) or math.nan) for name, total in totals.items()}


def _all_reduced(values: Mapping[str, float], over_ranks: Callable[[Mapping[str, Tensor]], Sums]) -> dict[str, float]:
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    return {name: float(value) for name, value in over_ranks(tensors).items()}
