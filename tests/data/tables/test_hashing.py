"""Keys of texts: the same everywhere, whatever array they lie in, and different for different texts."""

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kitforge.data.tables.hashing import hash_texts
from tests.text_keys import hash_text

TEXTS = ["", "a", "68fd1e64", "abcdefghi", "трі 三 😀", "x" * 100, "a\0", "a"]


def test_the_keys_are_the_same_in_every_version() -> None:
    wanted = [-2152535657050944081, 7860680498875604842, 4220937773330451113]
    assert [hash_text(text) for text in ("", "a", "68fd1e64")] == wanted


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
@pytest.mark.parametrize("start", [0, 3, len(TEXTS)])
def test_a_whole_array_has_the_keys_of_its_texts_wherever_it_begins(kind: pyarrow.DataType, start: int) -> None:
    array = pyarrow.array(TEXTS, kind)[start:]
    assert hash_texts(array).tolist() == [hash_text(text) for text in TEXTS[start:]]


def test_a_null_in_between_moves_no_other_key() -> None:
    keys = hash_texts(pyarrow.array(["one", None, "two"]))
    assert [keys[0], keys[2]] == [hash_text("one"), hash_text("two")]


def test_all_nulls_have_no_bytes() -> None:
    assert len(hash_texts(pyarrow.nulls(3, pyarrow.string()))) == 3


@given(st.lists(st.text(max_size=20), max_size=30))
def test_array_and_single_text_agree(texts: list[str]) -> None:
    assert hash_texts(pyarrow.array(texts, pyarrow.string())).tolist() == [hash_text(text) for text in texts]


def test_many_like_texts_have_as_many_keys() -> None:
    texts = [f"{number:08x}" for number in range(50_000)] + [f"user_{number}" for number in range(50_000)]
    assert len(set(hash_texts(pyarrow.array(texts)).tolist())) == len(texts)


def test_zeros_at_the_end_are_told_apart() -> None:
    assert len(set(hash_texts(pyarrow.array(["a" + "\0" * count for count in range(20)])).tolist())) == 20
