"""The batches of all kits: the order of rows, the part of each replica, and micro-batches.

All of it is a pure function of (seed, sample number, layout): a resumed run sees what a run without a break sees, and
the order of rows does not depend on the number of ranks.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kitforge.data.splitmix64 import hash_array
from kitforge.foundation.seed import key

Indices: TypeAlias = NDArray[np.int64]
_ROUNDS = 8
# A few rows cost as much as a block, so whole blocks are computed and the last ones cached.
_BLOCK_ROWS = 4096
_TOKEN_BYTES = 8
# Only attention sees prompts repeated and padding, whose memory is about an eighth of a layer's.
_PADDED = 4


OnSourceEnd: TypeAlias = Literal["restart", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The order of samples of several weighted sources. Rows are numbered source after source.

    The sources are the leaves of a balanced binary tree. A node with the fraction w in its left half sends
    floor(n w + 1/2) of its first n samples there, and the others to the right: a Sturmian word (Morse and Hedlund 1940,
    by the sequences of Beatty 1926), computed in integers. So the source of sample n is a function of n alone, without
    state, and after any number of samples the count of a source differs from its exact part by at most half a sample
    per level of the tree, ceil(log2(sources)) / 2. Independent draws would differ by the square root of n.

    The samples of a source are its rows, in an order of its own in each of its passes.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]  # relative to their sum; read as the decimal numbers that they are written as
    num_rows: tuple[int, ...]  # of each source
    seed: int
    shuffle: bool = True
    on_source_end: OnSourceEnd = "restart"  # a source without further rows starts again, or all data end

    def counts(self, num_samples: int) -> list[int]:
        """Samples of each source among the first `num_samples`."""
        return [counts[0] for counts in _counts(self._fractions(), [num_samples])]

    def metrics(self, num_samples: int) -> dict[str, float]:
        """The counts for a log line, by the last part of the names, or by the whole names if two have the same."""
        short = [name.rstrip("/").rpartition("/")[2] for name in self.names]
        labels = short if len(set(short)) == len(short) else self.names
        return {f"mixture/{label}": count for label, count in zip(labels, self.counts(num_samples), strict=True)}

    def rows(self, start: int, count: int) -> Indices:
        """Row indices [count] of the samples start .. start + count - 1."""
        counts = _counts(self._fractions(), range(start, start + count + 1))
        rows, offset = np.empty(count, dtype=np.int64), 0
        for number, (own, size) in enumerate(zip(counts, self.num_rows, strict=True)):
            seed, first = key(self.seed, "source", number), own[0]
            order = shuffled_indices(seed, size, first, own[-1] - first, shuffle=self.shuffle)
            rows[np.flatnonzero(np.diff(own))] = order + offset
            offset += size
        return rows

    def num_samples(self, epochs: float) -> int:
        """Samples in that many passes: with `restart` until every source was read that often, with `stop` until the
        first of them is exhausted."""
        wanted = [math.ceil(size * epochs) for size in self.num_rows]

        def is_past(samples: int) -> bool:
            pairs = list(zip(self.counts(samples), wanted, strict=True))
            if self.on_source_end == "stop":
                return any(count > size for count, size in pairs)
            return all(count >= size for count, size in pairs)

        bound = 1
        while not is_past(bound):
            bound *= 2
        found = bisect_left(range(bound), True, key=is_past)
        return found - 1 if self.on_source_end == "stop" else found

    def _fractions(self) -> list[Fraction]:
        return [Fraction(str(weight)) for weight in self.weights]


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one step, over all replicas."""

    start: int  # number of the first sample, counted over all epochs
    rows: Indices  # [samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSchedule:
    """The rows of each step, and the part of this replica."""

    num_rows: int
    batch_size: int  # samples of a step, over all replicas
    seed: int
    shuffle: bool = True
    epochs: float | None = None  # passes over the rows; None: one, or with `max_steps` without end
    max_steps: int | None = None  # a limit that the caller keeps
    micro_batch_size: int | None = None  # None: the whole part of a replica
    max_tokens: int | None = None  # of a micro-batch of `length_buckets` without `micro_batch_size`; None: any number
    max_eval_batches: int | None = None  # None: all evaluation rows
    replica: int = 0
    num_replicas: int = 1
    copies: int = 1  # slices of each micro-batch, which differ by one row at most
    mixture: Mixture | None = None  # the order of rows of several sources; None: all rows in one order

    @property
    def is_endless(self) -> bool:
        """Whether the data last for any number of steps."""
        ends = self.mixture is not None and self.mixture.on_source_end == "stop"
        return self.epochs is None and self.max_steps is not None and not ends

    def num_samples(self, epochs: float) -> int:
        """Samples in that many passes over the rows."""
        return self.mixture.num_samples(epochs) if self.mixture is not None else math.ceil(self.num_rows * epochs)

    def num_steps(self, epochs: float) -> int:
        """Steps in that many passes over the rows; the last one may be smaller."""
        return math.ceil(self.num_samples(epochs) / self.batch_size)

    def epoch(self, num_samples: int) -> float:
        """Passes over the rows in that many samples. Batches run across passes."""
        return num_samples / self.num_samples(1.0)

    def batches(self, sample: int) -> Iterator[Batch]:
        """The batch of each step, from that sample on."""
        limit = None if self.is_endless else self.num_samples(self.epochs or 1.0)
        while limit is None or sample < limit:
            size = self.batch_size if limit is None else min(self.batch_size, limit - sample)
            if self.mixture is not None:
                indices = self.mixture.rows(sample, size)
            else:
                indices = shuffled_indices(self.seed, self.num_rows, sample, size, shuffle=self.shuffle)
            yield Batch(sample, indices)
            sample += size

    def shard(self, size: int) -> slice:
        """This replica's part of a batch of that many samples; parts differ by one sample at most."""
        return slice(size * self.replica // self.num_replicas, size * (self.replica + 1) // self.num_replicas)

    def micro_batches(self, size: int) -> list[slice]:
        """The micro-batches of this replica's part of a batch, each as its slices. All replicas have equally many; some
        may be empty."""
        part, largest = self.shard(size), -(-size // self.num_replicas)
        step, copies = self.micro_batch_size or largest, self.copies
        starts = (min(part.start + start, part.stop) for start in range(0, largest, step))
        wholes = [range(start, min(start + step, part.stop)) for start in starts]
        cuts = ([each.start - (-len(each) * copy // copies) for copy in range(copies + 1)] for each in wholes)
        return [slice(*ends) for each in cuts for ends in pairwise(each)]

    def length_buckets(
        self, lengths: Sequence[int], max_tokens: int | None = None, prompts: Sequence[bytes] | None = None
    ) -> list[Indices]:
        """Micro-batches of at most `max_tokens` tokens, padding included, of this replica's part of rows of these
        lengths, the longest rows first. All replicas have equally many; some may be empty. None: by
        `micro_batch_size`, else by the schedule's own `max_tokens`. With the prompts of the rows, see
        `shared_prompt_batches`, rows of a prompt are of one replica as far as its part allows."""
        if max_tokens is None and self.micro_batch_size is None:
            max_tokens = self.max_tokens
        if max_tokens is None:
            return [np.arange(part.start, part.stop, dtype=np.int64) for part in self.micro_batches(len(lengths))]
        bounds = [len(lengths) * each // self.num_replicas for each in range(self.num_replicas + 1)]
        order, cut = list(range(len(lengths))), token_budget_batches
        if prompts is not None:
            first = {prompt: row for row, prompt in reversed(list(enumerate(prompts)))}
            order.sort(key=lambda row: first[prompts[row]])
            cut = partial(shared_prompt_batches, prompts=prompts)
        parts = [cut(order[start:stop], lengths, max_tokens) for start, stop in zip(bounds, bounds[1:], strict=False)]
        own = parts[self.replica]
        own += [np.zeros(0, dtype=np.int64)] * (max(map(len, parts)) - len(own))
        return [part for each in own for part in np.array_split(each, self.copies)]

    def eval_batches(self, num_rows: int) -> Iterator[Indices]:
        """The evaluation rows batch by batch, over all replicas."""
        stop = self._eval_stop(num_rows)
        for start in range(0, stop, self.batch_size):
            yield np.arange(start, min(start + self.batch_size, stop), dtype=np.int64)

    def eval_shards(self, num_rows: int) -> Iterator[Indices]:
        """This replica's evaluation rows in micro-batches, as many at once as in training. All replicas have equally
        many; some may be empty. The rows do not depend on the layout."""
        largest = -(-self.batch_size // self.num_replicas)
        size, stop = min(self.micro_batch_size or largest, largest), self._eval_stop(num_rows)
        for start in range(0, stop, size * self.num_replicas):
            begin = min(start + size * self.replica, stop)
            yield np.arange(begin, min(begin + size, stop), dtype=np.int64)

    def _eval_stop(self, num_rows: int) -> int:
        return num_rows if self.max_eval_batches is None else min(num_rows, self.max_eval_batches * self.batch_size)


def token_budget_batches(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[Indices]:
    """The indices in batches of at most `max_tokens` tokens, padding included, or one row; the longest first."""
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda each: (-lengths[each], each)):
        # All rows of a batch are padded to its first.
        if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(index)
    return [np.array(each, dtype=np.int64) for each in batches]


def shared_prompt_batches(
    indices: Sequence[int], lengths: Sequence[int], max_tokens: int, prompts: Sequence[bytes]
) -> list[Indices]:
    """The indices of rows that begin with these prompts, tokens in int64, in batches of at most `max_tokens` tokens or
    one row. Rows of a prompt follow one another, those with the longest row first, and its tokens count once in a
    batch. Padding does not count, but with it and every prompt a batch has at most `_PADDED` times as many tokens."""
    longest: dict[bytes, int] = {}
    for index in indices:
        longest[prompts[index]] = max(longest.get(prompts[index], 0), lengths[index])
    batches: list[list[int]] = []
    tokens = width = 0
    before = None
    for index in sorted(indices, key=lambda each: (-longest[prompts[each]], prompts[each], -lengths[each], each)):
        prompt, length = prompts[index], lengths[index]
        added = length - (len(prompt) // _TOKEN_BYTES if prompt == before else 0)
        width, before = max(width, length), prompt
        padded = width * (len(batches[-1]) + 1) if batches else 0
        if not batches or tokens + added > max_tokens or padded > _PADDED * max_tokens:
            batches.append([])
            tokens, added, width = 0, length, length
        batches[-1].append(index)
        tokens += added
    return [np.array(each, dtype=np.int64) for each in batches]


def train_eval_split(num_rows: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    """Training and evaluation rows; no evaluation rows with `fraction` 0. Appending rows to a dataset does not move
    earlier rows between the splits."""
    everything = np.arange(num_rows, dtype=np.int64)
    if fraction == 0 or num_rows < 2:
        return everything, everything[:0]
    chances = hash_array(everything.astype(np.uint64), key(seed, "validation")) / 2.0**64
    is_kept = chances < fraction
    # Neither part may be empty, however small or large the fraction.
    is_kept[np.argmin(chances)], is_kept[np.argmax(chances)] = True, False
    return everything[~is_kept], everything[is_kept]


def shuffled_indices(seed: int, num_rows: int, start: int, count: int, *, shuffle: bool = True) -> Indices:
    """Row indices [count] of the samples start .. start + count - 1, counted over all epochs.

    Every epoch visits every row once; epochs differ when they are shuffled. Memory and time are O(count).
    """
    samples = np.arange(start, start + count, dtype=np.int64)
    if not shuffle:
        return samples % num_rows
    rows = np.empty(count, dtype=np.int64)
    filled = 0
    while filled < count:
        epoch, index = divmod(start + filled, num_rows)
        block, position = divmod(index, _BLOCK_ROWS)
        indices = _block(seed, num_rows, epoch, block)[position : position + count - filled]
        rows[filled : filled + len(indices)] = indices
        filled += len(indices)
    return rows


def _counts(fractions: Sequence[Fraction], samples: Sequence[int]) -> list[Sequence[int]]:
    """For each fraction, its samples among the first n, for each n of `samples`."""
    if len(fractions) == 1:
        return [samples]
    middle = len(fractions) // 2
    part = sum(fractions[:middle]) / sum(fractions)
    numerator, denominator = part.as_integer_ratio()
    left = [(each * numerator + denominator // 2) // denominator for each in samples]
    right = [each - first for each, first in zip(samples, left, strict=True)]
    return _counts(fractions[:middle], left) + _counts(fractions[middle:], right)


@lru_cache(maxsize=32)
def _block(seed: int, num_rows: int, epoch: int, block: int) -> Indices:
    """The rows of one block of an epoch. Outputs of the network beyond `num_rows` are mapped again (cycle walking)."""
    keys = [key(seed, "order", epoch, round_) for round_ in range(_ROUNDS)]
    first = block * _BLOCK_ROWS
    positions = np.arange(first, min(first + _BLOCK_ROWS, num_rows), dtype=np.uint64)
    rows = _feistel(positions, num_rows, keys)
    while len(outside := np.flatnonzero(rows >= num_rows)):
        rows[outside] = _feistel(rows[outside], num_rows, keys)
    return rows.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], num_rows: int, keys: list[int]) -> NDArray[np.uint64]:
    """A keyed bijection of 0 .. width * height - 1, the smallest near-square of at least `num_rows`.

    An unbalanced Feistel network over remainders (Black and Rogaway 2002, generalised): each round adds to one half
    a keyed function of the other.
    """
    width = math.isqrt(num_rows - 1) + 1
    height = -(-num_rows // width)
    left, right = numbers // np.uint64(height), numbers % np.uint64(height)
    for round_, key_ in enumerate(keys):
        if round_ % 2 == 0:
            left = (left + hash_array(right, key_) % np.uint64(width)) % np.uint64(width)
        else:
            right = (right + hash_array(left, key_) % np.uint64(height)) % np.uint64(height)
    return left * np.uint64(height) + right
