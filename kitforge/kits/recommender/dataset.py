"""Rows of a table as batches of features, in any order."""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.columns import ColumnTable, NamedColumns
from kitforge.data.tables.split import RowSet
from kitforge.data.tables.synthetic_clicks import SyntheticClicks
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.features import FeatureEncoder


@final
class ClickDataset:
    """The rows of a set that are encoded alike; numbered from 0, whatever their numbers in the table are."""

    def __init__(self, table: ColumnTable, rows: RowSet, encoder: FeatureEncoder) -> None:
        self.encoder = encoder
        self._table = table
        self._rows = rows

    @property
    def num_rows(self) -> int:
        """How many there are."""
        return self._rows.num_rows

    @property
    def fingerprint(self) -> str:
        """Equal for samples that give equal batches."""
        return fingerprint_of("samples", self._table.fingerprint, self._rows.num_rows, self.encoder.fingerprint)

    @property
    def is_synthetic(self) -> bool:
        """Whether the true chances are known."""
        return isinstance(self._table, SyntheticClicks)

    def batch(self, indices: NDArray[np.int64]) -> FeatureBatch:
        """The samples of these numbers, in this order."""
        return self.encoder.encode(self.columns(indices))

    def columns(self, indices: NDArray[np.int64]) -> NamedColumns:
        """What was read of these samples."""
        return NamedColumns(self._table.rows(self._rows.rows(indices)), self._table.layout)

    def true_probabilities(self, indices: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """The true chance of a click of each of these samples, where the log is made up and so knows it."""
        return self._table.probabilities(self._rows.rows(indices)) if isinstance(self._table, SyntheticClicks) else None
