"""Miss ratio curves: the hit rate of the device tier by its size, from a sample of batches, before training."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kitforge.core.kernels.dispatch import select_table
from kitforge.data.splitmix64 import hash_array
from kitforge.embedding_cache.lookup import flat_ids
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.foundation.errors import DataError

# What a slot needs beside its row: key, pin, score, two flags, and two hash places of 16 bytes at half load.
SLOT_BYTES = 8 + 8 + 8 + 2 + 32
# Points of the curve for each doubling of the number of rows.
POINTS_PER_DOUBLING = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheEstimate:
    """The stack distances of a sample (Mattson et al., 1970), and the hit rates and bytes derived from them."""

    row_bytes: int  # of one row with its state
    num_batches: int
    num_accesses: int  # distinct rows of each counted batch, summed
    num_rows: int  # distinct rows of the whole sample
    largest_batch: int  # the most distinct rows of a batch
    distances: NDArray[np.int64]  # ascending, of all accesses to rows seen before: distinct rows accessed since
    tier_bytes: dict[str, int]  # by tier, with its index

    def hit_rate(self, rows: int) -> float:
        """The hit rate of a device tier of so many rows under lru."""
        return float(np.searchsorted(self.distances, rows, side="left")) / max(self.num_accesses, 1)

    def rows_for(self, hit_rate: float) -> int | None:
        """The fewest rows with that hit rate; None where no size reaches it, as first accesses always miss."""
        position = int(np.ceil(hit_rate * self.num_accesses)) - 1
        return int(self.distances[max(position, 0)]) + 1 if position < len(self.distances) else None

    def curve(self) -> list[tuple[int, float]]:
        """Rows and hit rate, from the largest batch to all rows."""
        low, high = max(self.largest_batch, 1), max(self.num_rows, self.largest_batch, 1)
        num = int(POINTS_PER_DOUBLING * np.log2(high / low)) + 2
        sizes = sorted({round(low * (high / low) ** (step / (num - 1))) for step in range(num)})
        return [(size, self.hit_rate(size)) for size in sizes]

    def __str__(self) -> str:
        lines = [
            f"{self.num_batches} batches need {self.num_accesses:,} rows, {self.num_rows:,} distinct, "
            f"at most {self.largest_batch:,} at once; {self.row_bytes} bytes a row",
            *(f"{tier:>8} {size / 2**20:>12,.1f} MiB" for tier, size in self.tier_bytes.items()),
            f"{'rows':>14} {'hit rate':>9}",
            *(f"{rows:>14,} {rate:>9.4f}" for rows, rate in self.curve()),
        ]
        return "\n".join(lines)


def estimate(
    options: CachedEmbeddingOptions,
    width: int,
    batches: Iterable[Tensor],
    *,
    warm_up: int = 0,
    sample_rate: float = 1.0,
) -> CacheEstimate:
    """The miss ratio curve and the tier sizes of a table with rows of `width` numbers, for batches of ids.

    The first `warm_up` batches fill the tier and are not counted. With a `sample_rate` below 1, only ids whose hash is
    below it are followed, and distances are scaled by 1 / sample_rate (SHARDS: Waldspurger, Park, Garthwaite and
    Ahmad, 2015). Raises DataError for an empty sample.
    """
    unique = select_table().unique
    needs = [_sampled(unique(flat_ids(ids).cpu())[0].numpy(), sample_rate) for ids in batches]
    if not needs:
        raise DataError("an estimate needs at least one batch", got="no batches", expected="at least one tensor of ids")
    rows = round(len(np.unique(np.concatenate(needs))) / sample_rate)
    return CacheEstimate(
        row_bytes=4 * width,
        num_batches=len(needs),
        num_accesses=sum(map(len, needs[warm_up:])),
        num_rows=rows,
        largest_batch=round(max(map(len, needs)) / sample_rate),
        distances=np.sort(np.rint(stack_distances(needs, warm_up) / sample_rate).astype(np.int64)),
        tier_bytes=tier_bytes(options, width, options.num_embeddings or rows),
    )


def _sampled(ids: NDArray[np.int64], rate: float) -> NDArray[np.int64]:
    """The ids whose hash, as a number in [0, 1), is below the rate: the same ones in every batch."""
    if rate >= 1.0:
        return ids
    return ids[hash_array(ids.view(np.uint64), 0) < np.uint64(rate * 2**64)]


def tier_bytes(options: CachedEmbeddingOptions, width: int, num_rows: int) -> dict[str, int]:
    """Bytes of each tier when `num_rows` rows have been seen."""
    each = 4 * width
    if options.device_rows is None:
        return {"device": num_rows * (each + SLOT_BYTES)}
    sizes = {"device": options.device_rows * (each + SLOT_BYTES)}
    has_store = options.path is not None or options.remote is not None
    host = options.host_rows if has_store else num_rows
    if host:
        sizes["host"] = host * (each + SLOT_BYTES)
    if options.path is not None:
        in_file = min(num_rows, options.file_rows or num_rows)
        sizes |= {"file": in_file * each, "file index": in_file * SLOT_BYTES}
    if options.remote is not None:
        sizes["remote"] = num_rows * each
    return sizes


def stack_distances(needs: list[NDArray[np.int64]], warm_up: int = 0) -> NDArray[np.int64]:
    """For each need of a row seen before, from batch `warm_up` on, in order: how many distinct others were needed
    since, up to the batch before.

    `needs` are the distinct rows of each batch; what a batch needs itself pushes nothing of it out. Between the need at
    i and its row's previous need p[i] lie the elements up to the start of the batch of i, of which those count that do
    not occur there again: all but the j of them whose own previous need is after p[i].
    """
    sequence = np.concatenate(needs)
    order = np.argsort(sequence, kind="stable")
    previous = np.full(len(sequence), -1, dtype=np.int64)
    is_same = sequence[order][1:] == sequence[order][:-1]
    previous[order[1:][is_same]] = order[:-1][is_same]
    starts = np.cumsum([0, *map(len, needs)])[:-1]
    recurring = count_larger_before(previous)
    for start, rows in zip(starts, needs, strict=True):
        batch = slice(start, start + len(rows))
        recurring[batch] -= count_larger_before(previous[batch])
    between = np.repeat(starts, list(map(len, needs))) - previous - 1 - recurring
    begin = sum(map(len, needs[:warm_up]))
    return between[begin:][previous[begin:] >= 0]


def count_larger_before(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each value, how many of those before it are larger.

    Bit by bit from the highest: among values that agree so far, those before with a one are larger than a zero. A
    stable sort by the bit keeps their order, so that each bit costs one pass.
    """
    counts = np.zeros(len(values), dtype=np.int64)
    positions, remaining = np.arange(len(values)), values + 1
    num_bits = int(remaining.max(initial=0)).bit_length()
    group = np.zeros(len(values), dtype=np.int64)
    for bit in reversed(range(num_bits)):
        ones = (remaining[positions] >> bit) & 1
        before = np.cumsum(ones) - ones
        starts = np.r_[True, group[1:] != group[:-1]] if len(group) else np.zeros(0, dtype=bool)
        before_group = np.maximum.accumulate(np.where(starts, before, 0))
        counts[positions] += np.where(ones == 0, before - before_group, 0)
        order = np.argsort(2 * group + ones, kind="stable")
        positions, group = positions[order], (2 * group + ones)[order]
        group = np.cumsum(np.r_[0, group[1:] != group[:-1]]) if len(group) else group
    return counts
