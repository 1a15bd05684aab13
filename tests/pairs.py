"""Cases of independent axes: not their whole product, but every two values of any two axes together."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few members of the product of the axes, in its order, such that every two values of two axes meet in one. Each is
    the one with the most pairs not yet met, the first of several."""
    values = [list(axis) for axis in axes]
    met = {case: set(combinations(enumerate(case), 2)) for case in product(*(range(len(axis)) for axis in values))}
    missing, chosen = set().union(*met.values()), []
    while missing:
        best = max(met, key=lambda case: len(met[case] & missing))
        missing -= met[best]
        chosen.append(best)
    return [tuple(axis[place] for axis, place in zip(values, case, strict=True)) for case in sorted(chosen)]
