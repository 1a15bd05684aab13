"""The cut of packed rows by keys: what a rank sees and how much, by torch's own mask of the documents."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from kitforge.core.parallel import row_cut
from kitforge.core.parallel.config import CHUNKS, ParallelConfig
from kitforge.core.parallel.key_gather import packed_boundaries
from kitforge.core.parallel.row_cut import RowCut, cut_rows
from tests.differential.drawn import drawn

LENGTHS: dict[str, Any] = {
    "exponential": lambda numbers: numbers.exponential(700),
    "lognormal": lambda numbers: numbers.lognormal(5.5, 1.3),
    "uniform": lambda numbers: numbers.uniform(1, 3000),
}


def packed(numbers: np.random.Generator, kind: str, rows: int, length: int = 4096) -> np.ndarray:
    """Rows of documents of drawn lengths, the last one cut off."""
    found = []
    for _ in range(rows):
        ends = np.zeros(length + 1, dtype=np.int64)
        place = 0
        while (place := place + int(LENGTHS[kind](numbers)) + 1) < length:
            ends[place] = 1
        found.append(ends[:length].cumsum())
    return np.stack(found)


def documents_of(batch: int, length: int) -> st.SearchStrategy[np.ndarray]:
    """Of rows that are cut often, seldom or never."""
    drawn_rows = st.tuples(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.5]))
    return drawn_rows.map(lambda each: (np.random.default_rng(each[0]).random((batch, length)) < each[1]).cumsum(1))


def by_work(documents: np.ndarray, ranks: int, **given: Any) -> RowCut:
    with mock.patch.object(row_cut, "PAIRS_PER_KEY", 0):
        return cut_rows(documents, ranks, **given)


def seen(documents: Tensor, window: int | None, is_causal: bool) -> Tensor:
    """torch's mask [B, queries, keys]."""

    def is_seen(row: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents[row, query] == documents[row, key]
        same = same & (query >= key) if is_causal else same
        return same if window is None else same & (query - key < window)

    batch, length = documents.shape
    return create_mask(is_seen, batch, 1, length, length, device="cpu")[:, 0]


@pytest.mark.prove
@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_fullest_rank_has_at_most_a_tenth_more_than_the_mean(kind: str, ranks: int) -> None:
    numbers = np.random.default_rng(ranks)
    neighbours, fullest = [], []
    for _ in range(12):
        documents = packed(numbers, kind, rows=6)
        work = by_work(documents, ranks).work
        fullest.append(work.max() / work.mean())
        with mock.patch.object(row_cut, "PAIRS_PER_KEY", 1e9):
            work = cut_rows(documents, ranks).work
        neighbours.append(work.max() / work.mean())
    assert max(fullest) < 1.1
    assert np.mean(neighbours) > 1.1


def test_keys_that_need_not_be_sent_are_worth_more_than_equal_work() -> None:
    short = packed(np.random.default_rng(0), "exponential", 2)
    assert (np.diff(cut_rows(short, 8).owners) >= 0).all()
    # Of one document of 65,536 tokens nearly all keys are sent anyway.
    found = cut_rows(np.zeros((1, 2**16), dtype=np.int64), 8)
    assert (np.diff(found.owners) < 0).any()
    assert found.work.max() / found.work.mean() < 1.01


@pytest.mark.slow
@drawn(60)
@given(st.data())
def test_work_and_needs_are_those_of_the_mask(data: st.DataObject) -> None:
    ranks, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    length, batch = ranks * CHUNKS * size, data.draw(st.integers(1, 3))
    documents, is_causal = data.draw(documents_of(batch, length)), data.draw(st.booleans())
    window = st.none() | st.integers(1, length + 2)
    windows = data.draw(st.lists(window, min_size=1, max_size=2, unique=True)) if is_causal else [None]
    price = data.draw(st.sampled_from([0, 1000]))
    with mock.patch.object(row_cut, "PAIRS_PER_KEY", price):
        cut = cut_rows(documents, ranks, windows, is_causal=is_causal)
    masks = [seen(torch.from_numpy(documents), each, is_causal) for each in windows]
    assert (np.sort(cut.owners) == np.arange(ranks).repeat(CHUNKS)).all()
    owners = torch.tensor(cut.owners).repeat_interleave(size, dim=1)
    widest = torch.stack(masks).any(0)
    for rank in range(ranks):
        own = (owners == rank).unsqueeze(2)
        assert cut.work[rank] == sum(int((mask & own).sum()) for mask in masks)
        chunks = (widest & own).any(1).unflatten(1, (-1, size)).any(2)
        assert torch.equal(torch.tensor(cut.needs[rank]), chunks)
    chunks = widest.unflatten(1, (-1, size)).any(2).int()
    assert cut.firsts.tolist() == chunks.argmax(2).tolist()
    assert cut.lasts.tolist() == (length - chunks.flip(2).argmax(2)).tolist()


@pytest.mark.slow
@drawn(60)
@given(st.data())
def test_boundaries_of_last_queries_are_the_mask_of_the_documents(data: st.DataObject) -> None:
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    queries, window = data.draw(st.integers(1, length)), data.draw(st.none() | st.integers(1, length))
    documents = torch.from_numpy(data.draw(documents_of(batch, length)))
    (of_queries, most), (of_keys, longest) = packed_boundaries(documents, queries, torch.device("cpu"))
    found = torch.zeros(batch * queries, batch * length, dtype=torch.bool)
    for first, end, begin, last in zip(of_queries, of_queries[1:], of_keys, of_keys[1:], strict=False):
        assert end - first <= min(most, last - begin) and last - begin <= longest
        for query in range(int(first), int(end)):
            place = int(last) - (int(end) - query)
            begins = int(begin) if window is None else max(int(begin), place + 1 - window)
            found[query, begins : place + 1] = True
    wanted = seen(documents, window, is_causal=True)[:, length - queries :]
    assert torch.equal(found, torch.block_diag(*wanted).bool())


@pytest.mark.parametrize(("length", "wanted"), [(1, 4), (32, 8), (33, 12)])
def test_rows_are_padded_to_whole_pieces(length: int, wanted: int) -> None:
    assert ParallelConfig(context=4, context_by="keys").shard_length(length) == wanted
    assert ParallelConfig(context=4, context_by="keys", tensor=2).shard_length(length) == wanted
    assert ParallelConfig(context=4).shard_length(length) == -(-length // 4)
