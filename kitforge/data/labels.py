"""The names of the labels of rows, and the number of a row's label."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kitforge.foundation.errors import DataError, nearest

_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")


def label_names(labels: Sequence[str | int]) -> tuple[str, ...]:
    """The names of labels: numbers in their order, texts by the alphabet. 1 and "1" are one label. Raises DataError for
    fewer than two."""
    are_numbers = all(isinstance(each, int) for each in labels)
    names = tuple(map(str, sorted(set(labels)))) if are_numbers else tuple(sorted(set(map(str, labels))))
    if len(names) < 2:
        raise DataError("the rows have one label only", got=", ".join(names), expected="two labels or more")
    return names


def find_label(label: object, index: Mapping[str, int]) -> int | None:
    """The number of a label among the names of `index`; None for an unknown one. A whole number that is no name counts
    the names, as Hugging Face has it, unless names are numbers themselves."""
    if str(label) in index:
        return index[str(label)]
    counts = isinstance(label, int) and 0 <= label < len(index) and not any(map(_NUMBER.fullmatch, index))
    return int(label) if isinstance(label, int) and counts else None


def label_index(label: object, index: Mapping[str, int], location: object) -> int:
    """See `find_label`. Raises DataError naming the row of an unknown label."""
    found = find_label(label, index)
    if found is None:
        names = list(index)
        fix = nearest(str(label), names)
        raise DataError(f"{location} has an unknown label", got=label, expected=", ".join(names[:20]), fix=fix)
    return found


def index_of(names: Sequence[str]) -> dict[str, int]:
    """The number of each name."""
    return {name: number for number, name in enumerate(names)}
