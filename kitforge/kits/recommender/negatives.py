"""Negative sampling for rankers: every row is a positive; negatives are items that its user has not taken."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.splitmix64 import hash_array
from kitforge.data.tables.columns import NamedColumns
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check
from kitforge.foundation.log import logger
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import NegativeOptions
from kitforge.kits.recommender.dataset import ClickDataset
from kitforge.kits.recommender.features import feature_tables
from kitforge.kits.recommender.schema import FeatureSchema

_log = logger(__name__)

_CHUNK_ROWS = 65_536
# Rejection-sampling attempts; afterwards the items that the user has not taken are listed and one is drawn.
_TRIES = 32

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickRows:
    """Rows with labels 0 and 1. Sample i has the rows starts[i] .. starts[i + 1] - 1; the first is the positive."""

    batch: FeatureBatch
    starts: Tensor  # int64 [B + 1]
    positions: Tensor  # int64 [rows]: 0 for a sample's own row, then the numbers of its negatives


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemPool:
    """The candidate items, each once, and the known (user, item) pairs."""

    keys: Ints  # [I]
    sums: Ints  # [I]: cumulative counts of the items
    columns: NamedColumns  # [I]: the item's columns, from the first row that has it
    taken: Ints  # hashes of user and item, ascending

    def draw(self, numbers: NDArray[np.uint64], *, by_popularity: bool) -> Ints:
        """Indices [n] of items, one per random number."""
        if not by_popularity:
            return (numbers % np.uint64(len(self.keys))).astype(np.int64)
        ticks = (numbers % np.uint64(self.sums[-1])).astype(np.int64)
        return np.searchsorted(self.sums, ticks, side="right")


class NegativeSampler:
    """Draws negative items for positive rows, as a pure function of seed, step and position in the step.

    Candidates and known pairs come from the training `rows`. Without rows (a stream), steps draw from their own items.
    """

    def __init__(self, options: NegativeOptions, schema: FeatureSchema, seed: int, rows: ClickDataset | None) -> None:
        self._options, self._seed = options, seed
        self.rows_of_sample = 1 + options.num_negatives  # at most, with the positive
        expected = "0 where rows have labels of their own"
        fix = "leave data.schema.label out where all rows are positives"
        check(schema.label is None, "data.negatives.num_negatives", options.num_negatives, expected, fix)
        item = options.item or next(iter(_reading(schema, None if schema.events is None else schema.events.item)), None)
        known = ", ".join(schema.categorical)
        check(item in schema.categorical, "data.negatives.item", item, f"the feature of the item: {known}")
        assert item is not None
        check(
            schema.group is not None or not options.exclude_seen,
            "data.negatives.exclude_seen",
            True,
            "false where nothing says who has taken an item",
            "name the column of the user as data.schema.group",
        )
        features = [*schema.numeric, *schema.bucketed, *schema.categorical, *schema.bags, *schema.sequences]
        unknown = [name for name in options.item_features if name not in features]
        check(not unknown, "data.negatives.item_features", unknown, f"features: {', '.join(features)}")
        self._item, self._user = schema.source_column(item), schema.group
        self._columns = tuple(schema.source_column(name) for name in (item, *options.item_features))
        # Histories made of events repeat pairs that the events already hold.
        tables = feature_tables(schema) if schema.events is None else {}
        self._histories = [
            schema.source_column(name) for name in schema.sequences if name in tables and tables[name] == tables[item]
        ]
        self._pool = None if rows is None else self._pool_of(rows)
        self._evaluated: tuple[ClickDataset, ItemPool] | None = None
        self._has_warned = False

    def training_rows(self, rows: ClickDataset, indices: Ints, own: slice, step: int) -> ClickRows:
        """The samples `indices[own]` of a step, with their negatives."""
        pool = self._pool
        if pool is None:
            columns = rows.columns(indices)
            pool = self._pool_with(columns, *self._counted(columns), self._pairs(columns))
        numbers = np.arange(own.start, own.start + len(indices[own]))
        return self._drawn(rows, indices[own], pool, numbers, ("negatives", step))

    def evaluation_rows(self, rows: ClickDataset, indices: Ints) -> ClickRows:
        """Evaluation samples. Their negatives are the same at every evaluation and exclude items that the user took in
        training or in these rows."""
        if self._evaluated is None or self._evaluated[0] is not rows:
            pool = self._pool_of(rows)
            if self._pool is not None:
                pool = replace(self._pool, taken=np.union1d(self._pool.taken, pool.taken))
            self._evaluated = (rows, pool)
        return self._drawn(rows, indices, self._evaluated[1], indices, ("negatives", "evaluation"))

    def _drawn(
        self, rows: ClickDataset, indices: Ints, pool: ItemPool, numbers: Ints, names: tuple[str, str | int]
    ) -> ClickRows:
        num, own = self._options.num_negatives, rows.columns(indices)
        salt = seeds.key(self._seed, *names)
        draws = hash_array((np.repeat(numbers * num, num) + np.tile(np.arange(num), len(own))).view(np.uint64), salt)
        positions = self._draw_positions(own, pool, draws)
        is_there = np.insert(positions.reshape(-1, num) >= 0, 0, True, axis=1)
        samples, slots = np.nonzero(is_there)
        negatives = np.flatnonzero(slots)
        columns = own.take(samples).replaced(negatives, pool.columns, positions[positions >= 0])
        labels = (slots == 0).astype(np.float32)
        batch = rows.encoder.encode(columns)
        starts = np.append(0, np.cumsum(is_there.sum(1)))
        return ClickRows(
            batch=replace(batch, labels=torch.from_numpy(labels)),
            starts=torch.from_numpy(starts),
            positions=torch.from_numpy(slots),
        )

    def _draw_positions(self, own: NamedColumns, pool: ItemPool, draws: NDArray[np.uint64]) -> Ints:
        """The index in the pool of each draw [B * num_negatives]; -1 if no item can be drawn."""
        sample = np.repeat(np.arange(len(own)), self._options.num_negatives)
        items, _ = own.keys(self._item)
        users = None if self._user is None else own.keys(self._user)[0]
        known = [pool.taken] if self._options.exclude_seen else []
        if self._histories and self._options.exclude_seen:
            assert users is not None
            lists = [own.lists(name) for name in self._histories]
            pairs = [_pair(np.repeat(users, each.lengths), each.values) for each in lists]
            known.append(np.sort(np.concatenate(pairs)))

        def may_not(rows: Ints, keys: Ints) -> NDArray[np.bool_]:
            found: NDArray[np.bool_] = items[sample[rows]] == keys
            for taken in known:
                assert users is not None
                found |= _contains(taken, _pair(users[sample[rows]], keys))
            return found

        by_popularity = self._options.negative_sampling == "popularity"
        positions, waiting = np.full(len(draws), -1), np.arange(len(draws))
        for attempt in range(_TRIES if len(pool.keys) else 0):
            if not len(waiting):
                break
            found = pool.draw(hash_array(draws[waiting], attempt), by_popularity=by_popularity)
            is_out = may_not(waiting, pool.keys[found])
            positions[waiting[~is_out]] = found[~is_out]
            waiting = waiting[is_out]
        for draw in waiting:
            left = np.flatnonzero(~may_not(np.full(len(pool.keys), draw), pool.keys))
            if len(left):
                counts = np.diff(pool.sums, prepend=0)[left]
                rest = replace(pool, keys=pool.keys[left], sums=np.cumsum(counts))
                positions[draw] = left[rest.draw(draws[draw : draw + 1], by_popularity=by_popularity)[0]]
        if (num_without := int((positions < 0).sum())) and not self._has_warned:
            self._has_warned = True
            _log.warning("%s negatives of a batch are left out: their users have taken all other items", num_without)
        return positions

    def _pool_of(self, rows: ClickDataset) -> ItemPool:
        """The pool of all these rows, in chunks; 8 bytes for each pair of user and item."""
        keys, firsts, counts = (np.zeros(0, np.int64) for _ in range(3))
        pairs = [keys]
        for start in range(0, rows.num_rows, _CHUNK_ROWS):
            columns = rows.columns(np.arange(start, min(start + _CHUNK_ROWS, rows.num_rows)))
            more, positions, times = self._counted(columns)
            keys, first, inverse = np.unique(np.append(keys, more), return_index=True, return_inverse=True)
            firsts = np.append(firsts, positions + start)[first]
            counts = np.bincount(inverse, weights=np.append(counts, times)).astype(np.int64)
            pairs.append(self._pairs(columns))
        return self._pool_with(rows.columns(firsts), keys, np.arange(len(keys)), counts, np.concatenate(pairs))

    def _pool_with(self, columns: NamedColumns, keys: Ints, firsts: Ints, counts: Ints, pairs: Ints) -> ItemPool:
        chosen = columns.select(self._columns).take(firsts)
        return ItemPool(keys=keys, sums=np.cumsum(counts), columns=chosen, taken=np.unique(pairs))

    def _counted(self, columns: NamedColumns) -> tuple[Ints, Ints, Ints]:
        """The distinct items of rows, the first row of each, and their counts."""
        keys, absent = columns.keys(self._item)
        there = np.flatnonzero(~absent)
        found, firsts, counts = np.unique(keys[there], return_index=True, return_counts=True)
        return found, there[firsts], counts

    def _pairs(self, columns: NamedColumns) -> Ints:
        if self._user is None:
            return np.zeros(0, np.int64)
        return _pair(columns.keys(self._user)[0], columns.keys(self._item)[0])


def with_user(schema: FeatureSchema) -> FeatureSchema:
    """The schema with the user column of events as the group: negatives exclude items by user."""
    if schema.group is not None or schema.events is None:
        return schema
    user = schema.events.user
    kinds = [schema.categorical[name].kind for name in _reading(schema, user)]
    return replace(schema, group=user, group_kind=kinds[0] if kinds else "text")


def _reading(schema: FeatureSchema, column: str | None) -> Sequence[str]:
    return [name for name, feature in schema.categorical.items() if (feature.column or name) == column]


def _pair(users: Ints, items: Ints) -> Ints:
    return hash_array(hash_array(users.view(np.uint64), 1) ^ items.view(np.uint64), 2).view(np.int64)


def _contains(ascending: Ints, values: Ints) -> NDArray[np.bool_]:
    if not len(ascending):
        return np.zeros(len(values), bool)
    positions = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    found: NDArray[np.bool_] = ascending[positions] == values
    return found
