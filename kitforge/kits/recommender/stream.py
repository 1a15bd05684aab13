"""Rows that come once and may never end: what a model is trained on while it is used (online learning)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import final

from kitforge.data.shard import digest
from kitforge.data.tables.chunk import BadRows
from kitforge.data.tables.columns import Columns, MemoryTable
from kitforge.data.tables.reading import blocks, read
from kitforge.data.tables.source import TableSource
from kitforge.data.tables.split import RowRange
from kitforge.foundation.errors import ConfigError
from kitforge.kits.recommender.features import Encoder, id_features
from kitforge.kits.recommender.fitting import fit
from kitforge.kits.recommender.samples import Samples
from kitforge.kits.recommender.schema import Schema

# Rows that features are fitted on where no run before has done it. They are trained on as well.
FITTED_ROWS = 10_000


@final
class Stream:
    """Batches of rows in the order in which they come. What is not taken yet is not read.

    It has no number of rows and no place to go back to: a run that resumes goes on with what comes next.
    """

    def __init__(self, source: TableSource, schema: Schema, bad: BadRows, encoder: Encoder | None = None) -> None:
        self._layout = schema.layout()
        parts = read(source, self._layout, bad, num_workers=1)
        if encoder is None:
            parts, encoder = self._fitted(parts, schema)
        self.encoder = encoder
        self._parts = parts

    @property
    def fingerprint(self) -> str:
        """Equal for streams whose rows are read alike; what will come nobody knows."""
        return digest("stream", self.encoder.fingerprint)

    def batches(self, size: int) -> Iterator[Samples]:
        """The next rows, `size` at a time; the last ones may be fewer."""
        for columns in blocks(self._parts, size):
            yield self._samples(columns, self.encoder)

    def _samples(self, columns: Columns, encoder: Encoder) -> Samples:
        return Samples(MemoryTable(self._layout, columns, ""), RowRange(0, len(columns)), encoder)

    def _fitted(self, parts: Iterator[Columns], schema: Schema) -> tuple[Iterator[Columns], Encoder]:
        """The parts as they were, and an encoder fitted on the first rows of them."""
        if any(feature.encoding == "vocabulary" for _, feature in id_features(schema)):
            raise ConfigError(
                "a stream has no vocabulary, since its values are not known beforehand",
                got="encoding: vocabulary",
                fix="encoding: hash or exact, or go on from a run: checkpoint=RUN",
            )
        first = next(blocks(parts, FITTED_ROWS))
        table = MemoryTable(self._layout, first, "")
        encoder = Encoder(schema, fit(schema, table, RowRange(0, len(first))))
        return chain([first], parts), encoder
