"""Training rows as batches of features: tables in any order, and streams that are read once (online learning)."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kitforge.data.document_shard import fingerprint_of
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.cells import CellRules
from kitforge.data.tables.columns import Columns, ColumnTable, InMemoryTable, NamedColumns
from kitforge.data.tables.row_stream import RowStream
from kitforge.data.tables.split import RowRange, RowSet
from kitforge.data.tables.synthetic_clicks import SyntheticClicks
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.log import logger
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.feature_fitting import fit_features
from kitforge.kits.recommender.features import FeatureEncoder, id_features
from kitforge.kits.recommender.schema import FeatureSchema

_log = logger(__name__)
_CELLS = CellRules()


class ClickDataset:
    """A subset of a table's rows with an encoder; samples are numbered from 0."""

    def __init__(self, table: ColumnTable, rows: RowSet, encoder: FeatureEncoder) -> None:
        self.encoder = encoder
        self._table = table
        self._rows = rows

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return self._rows.num_rows

    @property
    def fingerprint(self) -> str:
        """Equal for data sets with equal batches."""
        return fingerprint_of("samples", self._table.fingerprint, self._rows.num_rows, self.encoder.fingerprint)

    @property
    def is_synthetic(self) -> bool:
        """Whether the true click probabilities are known."""
        return isinstance(self._table, SyntheticClicks)

    def batch(self, indices: NDArray[np.int64]) -> FeatureBatch:
        """The encoded samples at `indices`, in this order."""
        return self.encoder.encode(self.columns(indices))

    def columns(self, indices: NDArray[np.int64]) -> NamedColumns:
        """The columns of these samples before encoding."""
        return NamedColumns(self._table.rows(self._rows.rows(indices)), self._table.layout)

    def true_probabilities(self, indices: NDArray[np.int64]) -> NDArray[np.float64] | None:
        """The true click probabilities of these samples; None unless the log is synthetic."""
        return self._table.probabilities(self._rows.rows(indices)) if isinstance(self._table, SyntheticClicks) else None


class StreamingDataset:
    """Batches of a stream in order of arrival. The source is read only as far as requested.

    It has no number of rows. Rows that were read but not trained on are in its state, and come first in the run that
    goes on; a `SeekableSource` is sent back to the first of them instead.
    """

    def __init__(
        self,
        source: Iterator[Any],
        schema: FeatureSchema,
        bad: BadRows,
        encoder: FeatureEncoder | None,
        num_fit_rows: int,
        cells: CellRules = _CELLS,
    ) -> None:
        self._layout = schema.layout()
        self._rows = RowStream(source, self._layout, cells)
        self._bad = bad
        self.encoder = self._fitted(schema, num_fit_rows) if encoder is None else encoder

    @property
    def fingerprint(self) -> str:
        """Equal for streams with equal encoders; their rows are unknown."""
        return fingerprint_of("stream", self.encoder.fingerprint)

    def batches(self, size: int) -> Iterator[ClickDataset]:
        """The next rows, `size` at a time; the last ones may be fewer."""
        is_empty = True
        while (columns := self._rows.read(size, self._bad)) is not None:
            yield ClickDataset(InMemoryTable(self._layout, columns, ""), RowRange(0, len(columns)), self.encoder)
            is_empty = False
        if is_empty:
            raise self._no_rows()

    def mark_trained(self) -> None:
        """Mark the oldest batch handed out as trained."""
        self._rows.mark_trained()

    def close(self) -> None:
        """Stop reading the source."""
        self._rows.close()

    def state(self) -> dict[str, Any]:
        """The position for a resumed run."""
        return self._rows.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue at a saved position."""
        self._rows.load_state(state)

    def _fitted(self, schema: FeatureSchema, num_rows: int) -> FeatureEncoder:
        """An encoder fitted on the first rows, which are then read again for training."""
        if any(feature.encoding == "vocabulary" for _, feature in id_features(schema)):
            raise ConfigError(
                "a stream has no vocabulary, since its values are not known beforehand",
                got="encoding: vocabulary",
                fix="encoding: hash or exact, or go on from a run: checkpoint=RUN",
            )
        _log.info("features are fitted on the first %s rows of the stream (data.num_fit_rows)", f"{num_rows:,}")
        # Bad rows are counted when they are read again for training.
        first: Columns | None = self._rows.read(num_rows, BadRows(policy=self._bad.policy))
        if first is None:
            raise self._no_rows()
        self._rows.rewind()
        statistics = fit_features(schema, InMemoryTable(self._layout, first, ""), RowRange(0, len(first)))
        return FeatureEncoder(schema, statistics)

    def _no_rows(self) -> DataError:
        left_out = f", {self._bad.total} bad ones left out" if self._bad.total else ""
        return DataError("there are no rows in the stream", got=f"no rows{left_out}", expected="at least one")
