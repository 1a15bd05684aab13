"""Evaluation that does not depend on the batch size: sums over all batches, divided once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from kitforge.foundation.types import Sums

Batch = TypeVar("Batch")


def weighted_means(
    batches: Iterable[Batch], sums: Callable[[Batch], Sums], counts: Callable[[Batch], Sums]
) -> dict[str, float]:
    """`sum of sums / sum of counts` by name, in float64; a sum without a count of its own is divided by "loss"'s."""
    totals: dict[str, float] = {}
    divisors: dict[str, float] = {}
    for batch in batches:
        for name, value in sums(batch).items():
            totals[name] = totals.get(name, 0.0) + float(value.double())
        for name, value in counts(batch).items():
            divisors[name] = divisors.get(name, 0.0) + float(value)
    return {name: total / max(divisors.get(name, divisors["loss"]), 1.0) for name, total in totals.items()}
