"""A label is one of its names, and a number is an index only beside names that are none."""

from typing import Any

import pytest

from kitforge.data.labels import head_labels, index_of, label_index, label_names
from kitforge.foundation import log
from kitforge.foundation.errors import DataError


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((10, 9, 2), (2, 9, 10)),
        ((True, False), (False, True)),
        ((True, 0), ("0", "True")),
        ((1, "1", 0), ("0", "1")),
        (("b", "a", "b"), ("a", "b")),
        ((-1, 1), (-1, 1)),
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


TAGS = ("O", "B-PER", "I-PER")


@pytest.mark.parametrize(
    ("known", "declared", "is_fixed", "names", "index"),
    [
        # The numbers of a data set mean its names, whatever their order in a checkpoint.
        (("B-PER", "O", "I-PER"), TAGS, False, ("B-PER", "O", "I-PER"), {"B-PER": 0, "O": 1, "I-PER": 2}),
        (("B-PER", "O", "I-PER"), TAGS[:2], False, ("B-PER", "O", "I-PER"), {"B-PER": 0, "O": 1, "I-PER": 2}),
        ((), TAGS, False, TAGS, {"O": 0, "B-PER": 1, "I-PER": 2}),
        (("no", "yes"), ("ham", "spam"), False, ("ham", "spam"), {"ham": 0, "spam": 1}),
        (("ham", "yes"), ("ham", "spam"), True, ("ham", "yes"), {"ham": 0, "yes": 1}),
        # Capitals alone make no other label, unless they part two.
        (("NO", "YES"), ("yes", "no"), False, ("NO", "YES"), {"yes": 1, "no": 0}),
        (("no", "yes"), ("no", "NO"), False, ("no", "NO"), {"no": 0, "NO": 1}),
        (("no", "NO"), ("NO", "no"), False, ("no", "NO"), {"no": 0, "NO": 1}),
        # Names without a meaning, and those of the options, stand for the classes in their order.
        (("LABEL_0", "LABEL_1"), ("ham", "spam"), False, ("LABEL_0", "LABEL_1"), {"ham": 0, "spam": 1}),
        (("0", "1"), ("ham", "spam"), False, ("0", "1"), {"ham": 0, "spam": 1}),
        (("no", "yes"), ("ham", "spam"), True, ("no", "yes"), {"ham": 0, "spam": 1}),
    ],
)
def test_the_labels_of_a_class_label_are_matched_by_name(
    known: Any, declared: Any, is_fixed: bool, names: Any, index: dict[str, int]
) -> None:
    found, numbers = head_labels(known, declared, list(declared), is_fixed=is_fixed)
    assert found == names
    assert index.items() <= numbers.items()


def test_other_classes_than_those_of_the_model_are_said_in_a_word(caplog: pytest.LogCaptureFixture) -> None:
    head_labels(("no", "yes"), ("ham", "spam"), [], is_fixed=False)
    assert (
        "the rows have other labels (ham, spam) than the model (no, yes), so it begins with a new head" in caplog.text
    )
