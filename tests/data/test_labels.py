"""A label is one of its names, and a number is an index only beside names that are none."""

from __future__ import annotations

from typing import Any

import pytest

from kitforge.data.labels import index_of, label_index, label_names
from kitforge.foundation import log
from kitforge.foundation.errors import DataError


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((10, 9, 2), ("2", "9", "10")),
        ((1, "1", 0), ("0", "1")),
        (("b", "a", "b"), ("a", "b")),
        ((-1, 1), ("-1", "1")),
        (("10", "9", "2"), ("2", "9", "10")),
    ],
)
def test_numbers_are_in_their_order_and_a_number_and_its_text_are_one_label(values: Any, names: Any) -> None:
    assert label_names(values) == names


@pytest.mark.parametrize(
    ("values", "warns"), [(("4.5", "1", "-2.25"), True), (("1", "2"), False), (("v1.5", "2.5"), False)]
)
def test_fractions_that_a_table_spells_as_texts_may_be_meant_as_numbers(
    values: Any, warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_warned", set[str]())
    label_names(values)
    assert ("problem_type=regression learns numbers" in caplog.text) is warns


@pytest.mark.parametrize(
    ("names", "label"),
    [(("1", "2", "3"), 0), (("-1", "1"), 0), (("10", "20"), 1), (("1", "2"), 7), (("0.5", "1.5"), 1), (("O", "2"), 0)],
)
def test_a_number_that_is_none_of_the_numbers_is_unknown(names: Any, label: int) -> None:
    with pytest.raises(DataError, match=rf"row 9 has an unknown label\n.*got: +{label}\n.*{names[0]}"):
        label_index(label, index_of(names), "row 9")


def test_a_number_beside_names_that_are_texts_is_an_index() -> None:
    assert [label_index(each, index_of(("no", "yes")), "row 1") for each in (0, 1, "yes")] == [0, 1, 1]
    with pytest.raises(DataError, match="unknown label"):
        label_index(2, index_of(("no", "yes")), "row 1")
    with pytest.raises(DataError, match="unknown label"):
        label_index("1", index_of(("no", "yes")), "row 1")
