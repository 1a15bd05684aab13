"""Rows hold every token once, predict every one but the first of a document once, and keep documents apart."""

import hashlib
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kitforge.data.schedule import shuffled_indices
from kitforge.data.text.packing import DocumentSplit, PackedRows, split_documents
from kitforge.data.text.token_cache import TokenCache
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.seed import key
from kitforge.foundation.types import IGNORED

PAD = 65535


def cache_of(lengths: Sequence[int]) -> TokenCache:
    """Documents of these lengths in which every token is another number."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return TokenCache(
        folder=Path(), fingerprint="", tokens=np.arange(offsets[-1], dtype=np.uint16) + np.uint16(7), offsets=offsets
    )


def plain_rows(documents: list[list[int]], length: int) -> list[dict[str, list[int]]]:
    """The definition, token by token: the token, its successor in the document, and where both stand."""
    stream = [
        (token, document[place + 1] if place + 1 < len(document) else IGNORED, number)
        for number, document in enumerate(documents)
        for place, token in enumerate(document)
    ]
    rows = []
    for begin in range(0, len(stream) - 1, length):
        row = stream[begin : begin + length]
        row += [(PAD, IGNORED, -1)] * (length - len(row))
        numbers = list(dict.fromkeys(number for _, _, number in row))
        own = [numbers.index(number) for _, _, number in row]
        rows.append(
            {
                "tokens": [token for token, _, _ in row],
                "targets": [target for _, target, _ in row],
                "positions": [place - own.index(number) for place, number in enumerate(own)],
                "documents": own,
            }
        )
    return rows


def as_lists(rows: dict[str, Tensor]) -> list[dict[str, list[int]]]:
    return [{name: tensor[row].tolist() for name, tensor in rows.items()} for row in range(len(rows["tokens"]))]


def all_rows(packed: PackedRows) -> dict[str, Tensor]:
    return packed.rows(np.arange(packed.num_rows))


CORPORA = st.tuples(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 9)).filter(
    lambda drawn: sum(drawn[0]) > drawn[1] and max(drawn[0]) > 1
)


@pytest.mark.slow
@given(CORPORA)
def test_rows_equal_their_definition(drawn: tuple[list[int], int]) -> None:
    lengths, length = drawn
    cache = cache_of(lengths)
    documents = [cache.tokens[a:b].tolist() for a, b in zip(cache.offsets, cache.offsets[1:], strict=False)]
    packed = PackedRows(cache, length=length, pad_id=PAD)
    rows = all_rows(packed)
    assert as_lists(rows) == plain_rows(documents, length)
    assert packed.num_targets == int((rows["targets"] != IGNORED).sum())


def plain_split(documents: list[list[int]], fraction: float, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """What is trained on and what is held out, by Python's own numbers."""
    if len(documents) < 20:
        cuts = [len(each) - round(len(each) * fraction) for each in documents]
        pairs = list(zip(documents, cuts, strict=True))
        return [each[:cut] for each, cut in pairs], [each[cut:] for each, cut in pairs]
    chances = [plain_scramble(number + key(seed, "validation")) / 2**64 for number in range(len(documents))]
    held_out = {number for number, chance in enumerate(chances) if chance < fraction}
    held_out = (held_out | {chances.index(min(chances))}) - {chances.index(max(chances))}
    return (
        [each for number, each in enumerate(documents) if number not in held_out],
        [each for number, each in enumerate(documents) if number in held_out],
    )


def plain_scramble(number: int) -> int:
    mask = 2**64 - 1
    number &= mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


# Several blocks of documents, with empty ones between the others, at both ends, and in all of a block and more.
RAGGED = [0, 0, *(number * 7919 % 31 % 13 for number in range(500)), *[0] * 400, *[3] * 130, 900, *[1] * 150, 2, 0]


def documents_of(cache: TokenCache) -> list[list[int]]:
    return [cache.tokens[a:b].tolist() for a, b in zip(cache.offsets, cache.offsets[1:], strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 64, 1000])
@pytest.mark.parametrize("fraction", [1e-9, 0.05, 0.999999])
@pytest.mark.parametrize("num_documents", [19, len(RAGGED)])
def test_rows_of_parts_equal_their_definition(num_documents: int, fraction: float, length: int) -> None:
    cache = cache_of([*RAGGED[-num_documents:-4], 1100, *RAGGED[-4:]])
    for part, documents in zip(
        split_documents(cache, fraction, seed=5), plain_split(documents_of(cache), fraction, seed=5), strict=True
    ):
        if sum(max(len(each) - 1, 0) for each in documents) == 0:
            with pytest.raises(DataError, match="nothing to predict"):
                PackedRows(cache, length=length, pad_id=PAD, part=part)
            continue
        packed = PackedRows(cache, length=length, pad_id=PAD, part=part)
        definition = plain_rows(documents, length)
        assert as_lists(all_rows(packed)) == definition
        backwards = np.arange(packed.num_rows)[::-1]
        assert as_lists(packed.rows(backwards)) == definition[::-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_documents", "length", "fraction", "digest"),
    [
        (5000, 64, 0.05, "c685683848fa2a11"),
        (5000, 1, 0.3, "39f712ed0c0f86d0"),
        (4096, 3001, 0.5, "de0d11a86588c955"),
        (12, 16, 0.25, "62a5e07c10439f83"),
    ],
)
def test_rows_and_their_order_are_those_of_earlier_versions(
    num_documents: int, length: int, fraction: float, digest: str
) -> None:
    cache = cache_of([number * 7919 % 1009 % 17 + (number % 1000 == 0) * 1000 for number in range(num_documents)])
    content = hashlib.blake2b(digest_size=8)
    for part in split_documents(cache, fraction, seed=11):
        packed = PackedRows(cache, length=length, pad_id=PAD, part=part)
        content.update(f"{packed.num_rows} {packed.num_targets}".encode())
        for column in packed.rows(shuffled_indices(3, packed.num_rows, 5, packed.num_rows + 20)).values():
            content.update(column.numpy().tobytes())
    assert content.hexdigest() == digest


def test_a_document_takes_less_than_a_byte_of_memory() -> None:
    num_documents = 200_000
    offsets = np.arange(num_documents + 1, dtype=np.int64) * 3
    cache = TokenCache(folder=Path(), fingerprint="", tokens=np.zeros(offsets[-1], np.uint16), offsets=offsets)
    tracemalloc.start()
    try:
        rows = [PackedRows(cache, length=64, pad_id=PAD, part=part) for part in split_documents(cache, 0.05, seed=0)]
        held, highest = tracemalloc.get_traced_memory()
        for each in rows:
            each.rows(np.arange(0, each.num_rows, 100))
        held_after_reading = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 0.5 * num_documents
    assert held_after_reading < 0.5 * num_documents
    # While the index is made as well, so that a corpus needs no more memory to be opened than to be read.
    assert highest < 15 * num_documents


@given(CORPORA, st.data())
def test_a_row_does_not_depend_on_those_asked_for_with_it(drawn: tuple[list[int], int], data: st.DataObject) -> None:
    lengths, length = drawn
    packed = PackedRows(cache_of(lengths), length=length, pad_id=PAD)
    indices = data.draw(st.lists(st.integers(0, packed.num_rows - 1), max_size=6))
    together = as_lists(packed.rows(np.array(indices, dtype=np.int64)))
    assert together == [as_lists(packed.rows(np.array([index])))[0] for index in indices]


def test_rows_have_the_types_and_shapes_that_models_take() -> None:
    rows = PackedRows(cache_of([9, 9]), length=4, pad_id=PAD).rows(np.array([0, 2, 4]))
    assert {name: tensor.dtype for name, tensor in rows.items()} == {
        "tokens": torch.int64,
        "targets": torch.int64,
        "positions": torch.int64,
        "documents": torch.int32,
    }
    assert {tensor.shape for tensor in rows.values()} == {(3, 4)}


def test_no_rows_are_no_rows() -> None:
    rows = PackedRows(cache_of([9]), length=4, pad_id=PAD).rows(np.array([], dtype=np.int64))
    assert {tensor.shape for tensor in rows.values()} == {(0, 4)}


def test_tokens_of_large_vocabularies_keep_their_value() -> None:
    tokens = np.array([2**31, 2**32 - 1, 5], dtype=np.uint32)
    cache = TokenCache(folder=Path(), fingerprint="", tokens=tokens, offsets=np.array([0, 3]))
    rows = PackedRows(cache, length=2, pad_id=0).rows(np.array([0]))
    assert rows["tokens"].tolist() == [[2**31, 2**32 - 1]]
    assert rows["targets"].tolist() == [[2**32 - 1, 5]]


@pytest.mark.parametrize("index", [-1, 3])
def test_a_row_that_is_none_is_refused(index: int) -> None:
    packed = PackedRows(cache_of([9]), length=3, pad_id=PAD)
    with pytest.raises(IndexError, match="rows are numbered 0 to 2"):
        packed.rows(np.array([0, index]))


def test_a_corpus_shorter_than_a_row_is_refused() -> None:
    with pytest.raises(DataError, match=r"(?s)shorter than one row.*8 tokens.*at least 9.*data\.sequence_length"):
        PackedRows(cache_of([8]), length=8, pad_id=PAD)
    assert PackedRows(cache_of([9]), length=8, pad_id=PAD).num_rows == 1


LAST_TWO = DocumentSplit(rule="tail", fraction=0.2, is_held_out=True)


def test_a_part_shorter_than_a_row_is_filled() -> None:
    rows = all_rows(PackedRows(cache_of([10]), length=5, pad_id=PAD, part=LAST_TWO))
    assert rows["targets"].tolist() == [[16, IGNORED, IGNORED, IGNORED, IGNORED]]


def test_a_part_with_nothing_to_predict_is_refused() -> None:
    with pytest.raises(DataError, match="nothing to predict"):
        PackedRows(cache_of([5, 5]), length=5, pad_id=PAD, part=LAST_TWO)


def test_a_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_length"):
        PackedRows(cache_of([9]), length=0, pad_id=PAD)


def ranges_of(cache: TokenCache, part: DocumentSplit) -> list[list[int]]:
    """First token and the one after the last of each document, as far as it belongs to the part."""
    begins, ends = part.cut(np.arange(cache.num_documents), cache.offsets[:-1], cache.offsets[1:])
    return np.stack([begins, ends], axis=1).tolist()


def chosen(cache: TokenCache, part: DocumentSplit) -> list[int]:
    return [number for number, (begin, end) in enumerate(ranges_of(cache, part)) if begin < end]


def test_the_split_depends_on_the_seed_alone_and_not_on_later_documents() -> None:
    few, many = cache_of([5] * 500), cache_of([5] * 1000)

    def held_out(cache: TokenCache, seed: int) -> list[int]:
        validation = split_documents(cache, 0.2, seed)[1]
        assert validation is not None
        return chosen(cache, validation)

    assert held_out(few, 3) == [number for number in held_out(many, 3) if number < 500]
    assert held_out(few, 3) != held_out(few, 4)


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_neither_part_of_a_split_is_empty(fraction: float) -> None:
    cache = cache_of([5] * 20)
    train, validation = split_documents(cache, fraction, seed=0)
    assert validation is not None
    assert min(len(chosen(cache, train)), len(chosen(cache, validation))) == 1


def test_without_a_fraction_everything_is_trained_on() -> None:
    cache = cache_of([5] * 30)
    train, validation = split_documents(cache, 0, seed=0)
    assert validation is None
    assert chosen(cache, train) == list(range(30))


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_fraction_that_cannot_be_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"data\.eval_fraction"):
        split_documents(cache_of([5]), fraction, seed=0)
