"""The share of values that training never saw, by feature: high where rows are written in another way than those of
training."""

from __future__ import annotations

from typing import final

import torch

from kitforge.core.parallel.world import World
from kitforge.foundation.log import logger
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.features import MISSING, UNKNOWN, FeatureEncoder, feature_tables, table_features
from kitforge.kits.recommender.schema import IdFeature

_log = logger(__name__)

PREFIX = "unknown_share/"
# Fewer values say nothing about the rows.
_MIN_VALUES = 20


@final
class UnknownValues:
    """Counts the values of features with a vocabulary. Hashed and exact features have no unknown values."""

    def __init__(self, encoder: FeatureEncoder) -> None:
        tables, owners = feature_tables(encoder.schema), table_features(encoder.schema)
        words = {name for name, item in owners.items() if isinstance(item, IdFeature) and item.encoding == "vocabulary"}
        self._names = [name for name, table in tables.items() if table in words]
        self.counts = {name: (0, 0) for name in self._names}  # unknown values and all that are present

    def add(self, batch: FeatureBatch) -> None:
        """Count the values of rows."""
        for name in self._names:
            if name in batch.ids:
                ids = batch.ids[name]
            else:
                ids = batch.bags[name].ids if name in batch.bags else batch.sequences[name].ids
            unknown, present = self.counts[name]
            more = int(torch.count_nonzero(ids == UNKNOWN)), int(torch.count_nonzero(ids != MISSING))
            self.counts[name] = unknown + more[0], present + more[1]

    def shares(self) -> dict[str, float]:
        """The share of unknown values by feature; 0 without values."""
        return {name: unknown / max(present, 1) for name, (unknown, present) in self.counts.items()}

    def all_reduce(self, world: World, warned: set[str]) -> dict[str, float]:
        """The shares over the rows of all ranks by metric. Rank 0 warns of features above half, once for each in
        `warned`."""
        parts = world.all_gather_object(self.counts)
        for name in self._names:
            self.counts[name] = sum(part[name][0] for part in parts), sum(part[name][1] for part in parts)
        if world.rank == 0:
            self.warn("evaluation", warned)
        return {f"{PREFIX}{name}": fraction for name, fraction in self.shares().items()}

    def warn(self, what: str, known: set[str]) -> None:
        """Log the features of which most values are unknown, but those in `known`, to which they are added."""
        for name, fraction in self.shares().items():
            if fraction > 0.5 and self.counts[name][1] >= _MIN_VALUES and name not in known:
                known.add(name)
                words = "%s: %.0f%% of the values of %r never occurred in training: is it written as it was there?"
                _log.warning(words, what, 100 * fraction, name)
