"""Which chunks of packed rows belong to which rank, where ranks gather keys: by the pairs of a query and a key it sees.

Arithmetic on the host over the documents of a batch, equal on all ranks. B rows, T their padded length, n chunks of a
row. It knows no tensor of a network and sends nothing.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kitforge.core.parallel.config import CHUNKS

# Pairs that a rank computes while a key arrives: 2 kFLOP of four grouped queries of 128 features at 400 TFLOP/s, 512
# bytes of a key and its value at 100 GB/s.
PAIRS_PER_KEY = 1000


class RowCut(NamedTuple):
    """The cut of a batch of rows into chunks of equal length, of which each rank has CHUNKS of a row."""

    owners: NDArray[np.int64]  # [B, n]: the rank of each chunk
    firsts: NDArray[np.int64]  # [B, n]: the first key that a query of the chunk sees, whatever the window
    lasts: NDArray[np.int64]  # [B, n]: behind the last key that a query of the chunk sees
    needs: NDArray[np.bool_]  # [ranks, B, n]: the chunks with keys that a rank sees
    work: NDArray[np.float64]  # [ranks]: the pairs of a query and a key that it sees, in a layer of each window


def cut_rows(
    documents: NDArray[np.int64], ranks: int, windows: Collection[int | None] = (None,), *, is_causal: bool = True
) -> RowCut:
    """The cut of rows [B, T], given by the document of each token, in `CHUNKS` times `ranks` chunks: by work, or in
    neighbouring chunks where keys that need not be sent are worth more than equal work."""
    batch, length = documents.shape
    size = length // (ranks * CHUNKS)
    indices = np.arange(length)
    begins = np.ones((batch, length + 1), dtype=bool)
    begins[:, 1:-1] = documents[:, 1:] != documents[:, :-1]
    starts = np.maximum.accumulate(np.where(begins[:, :-1], indices, 0), axis=1)
    ends = np.broadcast_to(indices + 1, starts.shape)
    if not is_causal:
        ends = np.minimum.accumulate(np.where(begins[:, 1:], ends, length)[:, ::-1], axis=1)[:, ::-1]
    pairs = np.add.reduce([np.minimum(ends - starts, window or length) for window in windows])
    work = pairs.reshape(batch, -1, size).sum(2).astype(np.float64)
    firsts, lasts = starts[:, ::size], ends[:, size - 1 :: size]
    firsts = np.maximum(firsts, indices[::size] + 1 - max(window or length for window in windows))
    numbers = np.arange(length // size)
    # [B, queries' chunk, keys' chunk]
    sees = (numbers >= (firsts // size)[..., None]) & (numbers * size < lasts[..., None])
    found = []
    for owners in (np.broadcast_to(numbers // CHUNKS, work.shape), _by_work(work, ranks)):
        is_own = owners == np.arange(ranks).reshape(-1, 1, 1)
        needs = np.einsum("rbq,bqk->rbk", is_own.astype(np.float32), sees.astype(np.float32)) > 0
        load, sent = (is_own * work).sum((1, 2)), (needs & ~is_own).sum((1, 2)) * size
        cost = float((load + PAIRS_PER_KEY * len(windows) * sent).max())
        found.append((cost, RowCut(owners, firsts, lasts, needs, load)))
    return min(found, key=lambda each: each[0])[1]


def _by_work(work: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """The heaviest chunk first, to the rank with the least work of all rows so far that has room in this row."""
    owners, load = np.empty(work.shape, dtype=np.int64), [0.0] * ranks
    for row, own in enumerate(work):
        room = [CHUNKS] * ranks
        for chunk in np.argsort(-own, kind="stable").tolist():
            rank = min((each for each in range(ranks) if room[each]), key=load.__getitem__)
            owners[row, chunk] = rank
            load[rank] += float(own[chunk])
            room[rank] -= 1
    return owners
