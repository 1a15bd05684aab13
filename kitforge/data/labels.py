"""The names of the labels of rows, and the number of a row's label."""

import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Literal, TypeAlias

from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger, warn_once

# As transformers has it: one label of a row, any number of them, or numbers.
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
# The label of a row; a list of labels, or of zeros and ones for all of them, where it may have several.
# A number or a list of them, in a regression.
Label: TypeAlias = str | int | float | Sequence[Any]
_NUMBER = re.compile(r"[-+]?\d+(\.\d*)?")
_log = logger(__name__)
_WHOLE = re.compile(r"0|-?[1-9]\d*")  # as str(int) writes it


def label_names(labels: Sequence[str | int]) -> tuple[Any, ...]:
    """The names of labels: whole numbers in their order, texts by the alphabet. 1 and "1" are one label, a text; where
    all labels are whole numbers, or booleans, so are the names. Raises DataError for fewer than two."""
    texts = set(map(str, labels))
    are_numbers = all(_WHOLE.fullmatch(each) for each in texts)
    names = tuple(sorted(texts, key=int)) if are_numbers else tuple(sorted(texts))
    if len(names) < 2:
        raise DataError("the rows have one label only", got=", ".join(names), expected="two labels or more")
    fraction = next((each for each in names if "." in each), None)
    if fraction and all(map(_NUMBER.fullmatch, names)):
        # As tables spell numbers.
        warn_once(_log, f"labels such as {fraction} are taken as names; problem_type=regression learns numbers")
    kinds = set(map(type, labels))
    return tuple(dict(zip(map(str, labels), labels, strict=True))[each] for each in names) if len(kinds) == 1 else names


def head_labels(
    known: tuple[Any, ...], declared: Sequence[str], found: Sequence[Label], *, is_fixed: bool
) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The labels of a head, and the number of each name that the rows have. `known` are those of the options or of the
    checkpoint, and kept if `is_fixed`; `declared` those of the rows' ClassLabel, of which others than the known ones
    begin a new head; without both, the labels `found` in the rows are taken in order."""
    if len(declared) < 2 or set(declared) <= set(known):
        labels = known or names_of(found)
        return labels, index_of(labels)
    # Checkpoints spell POSITIVE what data sets call positive; transformers' scripts compare so too.
    small = {str(name).lower(): number for number, name in enumerate(known)}
    spelt = {name.lower() for name in declared}
    if len(small) == len(known) and len(spelt) == len(declared) and spelt <= small.keys():
        return known, index_of(known) | {name: small[name.lower()] for name in declared}
    # Names that say nothing, or that the caller chose, stand for the classes in their order.
    is_nameless = all(str(name) in (f"LABEL_{number}", str(number)) for number, name in enumerate(known))
    if len(known) == len(declared) and (is_fixed or is_nameless) and not set(known) & set(declared):
        return known, index_of(known) | index_of(declared)
    if known and is_fixed:
        return known, index_of(known)
    if known:
        few, others = (", ".join(map(str, each[:8])) for each in (known, declared))
        _log.warning("the rows have other labels (%s) than the model (%s), so it begins with a new head", others, few)
    return tuple(declared), index_of(declared)


def names_of(labels: Sequence[Label]) -> tuple[Any, ...]:
    """`label_names` of rows that have one label each, or a list of them. Where all have as many zeros and ones, these
    are LABEL_0, LABEL_1, ..."""
    if not any(isinstance(each, (list, tuple)) for each in labels):
        return label_names([each for each in labels if isinstance(each, (str, int))])
    lists: list[list[Any]] = [list(each) if isinstance(each, (list, tuple)) else [each] for each in labels]
    sizes = {len(each) for each in lists}
    if len(sizes) == 1 and max(sizes) > 1 and all(map(_is_multi_hot, lists)):
        return tuple(f"LABEL_{number}" for number in range(max(sizes)))
    return label_names([label for each in lists for label in each])


def multi_hot(label: Label, index: Mapping[str, int], location: object) -> list[float]:
    """A one for each label of a row and a zero for each other one. Raises DataError as `label_index` does."""
    values: list[Any] = list(label) if isinstance(label, (list, tuple)) else [label]
    # A number may have two names.
    size = len(set(index.values()))
    if len(values) == size and _is_multi_hot(values) and not {"0", "1"} & index.keys():
        return [float(each) for each in values]
    found = [0.0] * size
    for each in values:
        found[label_index(each, index, location)] = 1.0
    return found


def number_names(labels: Sequence[tuple[object, Label]], known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the numbers of a regression: the known ones, else LABEL_0, ..., as many as the first row has."""
    width = len(numbers_of(labels[0][1], None, labels[0][0])) if labels else 1
    return known or tuple(f"LABEL_{number}" for number in range(width))


def numbers_of(label: Label | None, names: Sequence[str] | None, location: object) -> list[float]:
    """The numbers of a row for each of `names`, which may be spelt as texts. Raises DataError naming the row of what is
    no finite number, and of another count of them."""
    values: list[Any] = list(label) if isinstance(label, (list, tuple)) else [label]
    found = [_number(each) for each in values]
    wrong = [each for each, number in zip(values, found, strict=True) if number is None]
    expected = "a finite number, or a list of them" if names is None else f"a finite number for each of {list(names)}"
    if wrong or not values:
        got = f"{wrong[0] if wrong else values!r}"
        raise DataError(f"{location} is not a row of numbers", got=got, expected=expected)
    if names is not None and len(found) != len(names):
        fix = 'labels=["score"] begins a new head for other numbers'
        raise DataError(f"{location} has another count of numbers", got=f"{label!r}", expected=expected, fix=fix)
    return [number for number in found if number is not None]


def _number(value: object) -> float | None:
    try:
        number = None if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if number is not None and isfinite(number) else None


def _is_multi_hot(values: Sequence[Any]) -> bool:
    return all(not isinstance(each, str) and each in (0, 1) for each in values)


def find_label(label: object, index: Mapping[str, int]) -> int | None:
    """The number of a label among the names of `index`; None for an unknown one. A whole number that is not a name
    counts the names, as Hugging Face has it, unless names are numbers themselves."""
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


def index_of(names: Sequence[object]) -> dict[str, int]:
    """The number of each name, as text."""
    return {str(name): number for number, name in enumerate(names)}
