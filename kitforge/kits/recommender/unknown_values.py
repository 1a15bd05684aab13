"""The share of values that training never saw, by feature: high where rows are written in another way than those of
training."""

import math

import numpy as np
import torch
from torch import Tensor

from kitforge.core.parallel.world import World
from kitforge.data.tables.frequency_counter import FrequencyCounter
from kitforge.embedding_cache.serving.table import ServedTable
from kitforge.foundation.log import logger
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.dataset import ClickDataset, StreamingDataset
from kitforge.kits.recommender.features import UNKNOWN, FeatureEncoder, feature_keys, feature_tables, table_features
from kitforge.kits.recommender.model import ReadOnlyTables, Recommender
from kitforge.kits.recommender.schema import IdFeature
from kitforge.report.summary import SHARES

_log = logger(__name__)

# Fewer values say nothing about the rows.
_MIN_VALUES = 20
_CHUNK_ROWS = 65_536


class UnknownValues:
    """Counts the values outside the vocabulary of a feature; with a served `model`, also other ids without a row in its
    checkpoint. Of hashed ids this is a lower bound: an unknown one may share the row of another."""

    def __init__(self, encoder: FeatureEncoder, model: Recommender | None = None) -> None:
        tables, owners = feature_tables(encoder.schema), table_features(encoder.schema)
        ids = {name: item.encoding for name, item in owners.items() if isinstance(item, IdFeature)}
        encodings = {name: ids[table] for name, table in tables.items() if table in ids}
        self._words = {name for name, encoding in encodings.items() if encoding == "vocabulary"}
        self._names = [name for name in encodings if name in self._words or model is not None]
        self._encoder, self.model = encoder, model
        self.counts = {name: (0, 0) for name in self._names}  # unknown values and all that are present

    def add(self, batch: FeatureBatch) -> None:
        """Count the values of rows."""
        for name in self._names:
            ids = _ids_of(batch, name)
            ids = ids[ids != self._encoder.missing_id(name)]
            is_unknown = ids == UNKNOWN if name in self._words else self._has_no_row(name, ids)
            unknown, present = self.counts[name]
            self.counts[name] = unknown + int(torch.count_nonzero(is_unknown)), present + len(ids)

    def _has_no_row(self, name: str, ids: Tensor) -> Tensor:
        assert self.model is not None and isinstance(self.model.tables, ReadOnlyTables)
        found = self.model.requests.rows_of(name, ids)
        if found is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        table = self.model.tables.tables[found[0]]
        assert isinstance(table, ServedTable)
        return ~table.has_rows(found[1])

    def shares(self) -> dict[str, float]:
        """The share of unknown values by feature; NaN without values."""
        return {name: unknown / (present or math.nan) for name, (unknown, present) in self.counts.items()}

    def all_reduce(self, world: World, warned: set[str]) -> dict[str, float]:
        """The shares over the rows of all ranks by metric. Rank 0 warns of features above half, once for each in
        `warned`."""
        parts = world.all_gather_object(self.counts)
        for name in self._names:
            self.counts[name] = sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)
        if world.rank == 0:
            self.warn("evaluation", warned)
        return {f"{SHARES.removeprefix('eval/')}{name}": fraction for name, fraction in self.shares().items()}

    def warn(self, what: str, known: set[str]) -> None:
        """Log the features of which most values are unknown, but those in `known`, to which they are added."""
        for name, fraction in self.shares().items():
            if fraction > 0.5 and self.counts[name][1] >= _MIN_VALUES and name not in known:
                known.add(name)
                words = "%s: %.0f%% of the values of %r never occurred in training: is it written as it was there?"
                _log.warning(words, what, 100 * fraction, name)


def unlearned_values(rows: ClickDataset | StreamingDataset | None) -> str | None:
    """Words about the values in these rows that are outside the vocabularies; None without any, and for streams."""
    if not isinstance(rows, ClickDataset):
        return None
    statistics, tables = rows.encoder.statistics, feature_tables(rows.encoder.schema)
    counters = {name: FrequencyCounter() for name in statistics.vocabularies}
    for start in range(0, rows.num_rows if counters else 0, _CHUNK_ROWS):
        columns = rows.columns(np.arange(start, min(start + _CHUNK_ROWS, rows.num_rows)))
        for name, keys in feature_keys(rows.encoder.schema, columns):
            if tables[name] in counters:
                counters[tables[name]].add(keys[rows.encoder.ids_of(name, keys) == UNKNOWN])
    words = [
        f"{len(counter.keys):,} values of {name!r} in {int(counter.counts.sum()):,} places"
        for name, counter in counters.items()
        if len(counter.keys)
    ]
    return f"outside the vocabulary of the run, so they share its unknown row: {'; '.join(words)}" if words else None


def _ids_of(batch: FeatureBatch, name: str) -> Tensor:
    """The ids [n] of a feature in a batch, without padding."""
    if name in batch.ids:
        return batch.ids[name]
    if name in batch.bags:
        return batch.bags[name].ids
    found = batch.sequences[name]
    return found.ids[torch.arange(found.ids.shape[1]) < found.lengths[:, None]]
