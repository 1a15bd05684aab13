"""Scores rows, and finds items for users through faiss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.shard import digest
from kitforge.data.tables.chunk import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import NamedColumns
from kitforge.data.tables.source import open_table
from kitforge.data.token_cache import default_root
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.log import logger
from kitforge.kits.recommender.assembling import finding_of
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.catalogue import Catalogue, save_catalogue
from kitforge.kits.recommender.config import RecommendationOptions
from kitforge.kits.recommender.data import table_config
from kitforge.kits.recommender.features import Encoder
from kitforge.kits.recommender.keeping import ITEMS
from kitforge.kits.recommender.model import Recommender, inputs_of
from kitforge.kits.recommender.objective import Finding
from kitforge.kits.recommender.serving import faiss, keep_index, kept_index, serving_folder
from kitforge.models.sasrec.model import SASRec

_log = logger(__name__)

INDEX = "items.faiss"
_ROWS_AT_ONCE = 8192
Row = Mapping[str, Any]


@final
class RecommendationPipeline:
    """`pipeline(row)` gives `{"score": ...}`, the chance of a click; a list of rows, a file or a data set gives a list
    of those. `retrieve(user, k)` gives the k items that go best with a user."""

    def __init__(self, model: Recommender, encoder: Encoder, options: RecommendationOptions) -> None:
        self.model = model.eval()
        self.encoder = encoder
        self.options = options
        self._finding = finding_of(model.config, options, encoder, model.catalogue)
        self._index: Any = None

    @torch.no_grad()
    def __call__(self, rows: Any) -> Any:
        """See the class. Rows need no label."""
        if isinstance(rows, Mapping):
            return self([rows])[0]
        if isinstance(rows, Sequence) and not len(rows):
            return []
        if isinstance(self.model.network, SASRec):
            raise ModelError(
                "this family scores no pairs", got=self.model.config.family, fix="ask for items: retrieve(user, k=10)"
            )
        found: list[dict[str, float]] = []
        for batch in self._batches(rows):
            inputs = inputs_of(batch, self.model.plan)
            logits = self.model(lambda inputs=inputs: self.model.logits(inputs))
            found += [{"score": score} for score in logits.float().sigmoid().tolist()]
        return found

    @torch.no_grad()
    def retrieve(self, users: Row | Sequence[Row], k: int = 10) -> Any:
        """The k items that go best with a user, the best first: `[{"item": ..., "score": ...}]`; a list of users gives
        a list of those. A user is a row with the user's features, or with the sequence of items taken so far.

        An item is what the data call it: a whole number, or a text.
        """
        check(k >= 1, "k", k, "a whole number of at least 1")
        if isinstance(users, Mapping):
            return self.retrieve([users], k)[0]
        if not users:
            return []
        finding, catalogue, index = self._ready()
        answers: list[list[dict[str, Any]]] = []
        for batch in self._batches(list(users)):
            vectors = finding.user_vectors(self.model, batch).float().cpu().numpy()
            scores, places = index.search(np.ascontiguousarray(vectors), min(k, len(catalogue)))
            answers += [_named(catalogue, row, row_scores) for row, row_scores in zip(places, scores, strict=True)]
        return answers

    @torch.no_grad()
    def save_index(self, folder: str | Path) -> None:
        """Write faiss's index of the item vectors, items.faiss, and what its places are called, items.safetensors."""
        _, catalogue, index = self._ready()
        keep_index(Path(folder) / INDEX, index)
        save_catalogue(Path(folder) / ITEMS, catalogue)

    def _ready(self) -> tuple[Finding[Any], Catalogue, Any]:
        if self._finding is None or self.model.catalogue is None:
            raise ModelError(
                "this family finds no items, it scores rows",
                got=self.model.config.family,
                expected="a two_tower or a sasrec",
                fix="call the pipeline with rows",
            )
        if self._index is None:
            self._index = self._kept_or_new(self._finding, self.options.retrieval.index)
        return self._finding, self.model.catalogue, self._index

    def _kept_or_new(self, finding: Finding[Any], kind: str) -> Any:
        """The index of the items, kept beside the run so that the next pipeline has it at once."""
        if self.model.origin is None:
            return index_of(finding.item_vectors(self.model), kind)
        mark = digest("index", kind, self.options.tables.served, getattr(faiss(), "__version__", ""))[:12]
        path = serving_folder(self.model.origin) / f"items-{mark}.faiss"
        if (index := kept_index(path)) is None:
            index = index_of(finding.item_vectors(self.model), kind)
            try:
                keep_index(path, index)
            except OSError as error:
                _log.warning("the index of items is not kept: %s", error)
        return index

    def _batches(self, rows: Any) -> list[FeatureBatch]:
        source = open_table(rows, table_config(self.options.data))
        layout = self.encoder.schema.layout(with_label=False)
        table = load_table(source, layout, default_root(), BadRows(policy=self.options.data.on_bad_row))
        starts = range(0, table.num_rows, _ROWS_AT_ONCE)
        parts = (np.arange(start, min(start + _ROWS_AT_ONCE, table.num_rows)) for start in starts)
        return [self.encoder.encode(NamedColumns(table.rows(part), layout)) for part in parts]


def index_of(vectors: Tensor, kind: str) -> Any:
    """faiss's index, by inner product, of vectors [I, dim]; raises DependencyError without faiss, ConfigError for words
    that it does not know or that ask for more items than there are."""
    values = np.ascontiguousarray(vectors.float().cpu().numpy())
    library = faiss()
    try:
        index = library.index_factory(values.shape[1], kind, library.METRIC_INNER_PRODUCT)
        index.train(values)
        index.add(values)
    except RuntimeError as error:
        raise ConfigError(
            f"faiss makes no index {kind!r} of these items",
            got=f"{len(values):,} items; {str(error).rpartition(': ')[2]}",
            expected="words of faiss's index_factory, with no more clusters than there are items",
            fix="retrieval.index=Flat is exact and needs nothing",
        ) from error
    return index


def _named(catalogue: Catalogue, places: NDArray[np.int64], scores: NDArray[np.float32]) -> list[dict[str, Any]]:
    found = [(place, score) for place, score in zip(places.tolist(), scores.tolist(), strict=True) if place >= 0]
    return [{"item": catalogue.item(place), "score": score} for place, score in found]
