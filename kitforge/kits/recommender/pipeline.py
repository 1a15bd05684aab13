"""Inference: scores rows, and retrieves items for users by faiss."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kitforge.data.cache_folder import default_root
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.features import python_rows
from kitforge.data.tables.arrow_to_columns import keys_of
from kitforge.data.tables.bad_rows import BadRows
from kitforge.data.tables.column_cache import load_table
from kitforge.data.tables.columns import NamedColumns
from kitforge.data.tables.source import open_table
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.log import logger
from kitforge.kits.recommender.artifacts import ITEMS
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RecommendationOptions, RetrievalOptions
from kitforge.kits.recommender.data import table_config
from kitforge.kits.recommender.factory import OBJECTIVES, build_retrieval_objective
from kitforge.kits.recommender.features import FeatureEncoder
from kitforge.kits.recommender.item_catalog import ItemCatalog, save_item_catalog
from kitforge.kits.recommender.model import MISSING_SUFFIX, Recommender, inputs_of
from kitforge.kits.recommender.objective import RetrievalObjective
from kitforge.kits.recommender.serving import faiss, save_index, serving_folder
from kitforge.report.notebook import Rows

_log = logger(__name__)

INDEX = "items.faiss"
ROWS_AT_ONCE = 8192
Row = Mapping[str, Any]


class RecommendationPipeline:
    """`pipeline(row)` returns `{"score": ...}`, the click probability; a list of rows, a file or a data set returns a
    list. `retrieve(user, k)` returns the k best items for a user."""

    def __init__(self, model: Recommender, encoder: FeatureEncoder, options: RecommendationOptions) -> None:
        self.model = model.eval()
        self.encoder = encoder
        self.options = options
        self._retrieval = build_retrieval_objective(model.config, options, encoder, model.item_catalog)
        self._index: Any = None

    @torch.no_grad()
    def __call__(self, rows: Any) -> Any:
        """See the class. Rows need no label."""
        rows, is_one = _rows_of(rows)
        if is_one:
            return self(rows)[0]
        if isinstance(rows, Sequence) and not len(rows):
            return []
        if not self.is_scored:
            raise ModelError(
                "this family scores no pairs", got=self.model.config.family, fix="ask for items: retrieve(user, k=10)"
            )
        return Rows({"score": score} for batch in self._batches(rows) for score in self.scores(batch).tolist())

    @torch.no_grad()
    def scores(self, batch: FeatureBatch) -> Tensor:
        """Click probabilities [n] of encoded rows. Raises ModelError for a score that is NaN."""
        inputs = inputs_of(batch, self.model.requests)
        logits: Tensor = self.model(lambda: self.model.logits(inputs))
        scores = logits.float().sigmoid()
        _check_finite(scores)
        return scores

    @torch.no_grad()
    def retrieve(self, users: Any, k: int = 10) -> Any:
        """The k items that go best with a user, the best first: `[{"item": ..., "score": ...}]`; a list of users, a
        file or a data set gives a list of those. A user is a row with the user's features, or with the sequence of
        items taken so far.

        An item is what the data call it: a whole number, or a text.
        """
        check(k >= 1, "k", k, "a whole number of at least 1")
        users, is_one = _rows_of(users)
        if is_one:
            return self.retrieve(users, k)[0]
        if hasattr(users, "__len__") and not len(users):
            return []
        encoder, wanted = self.user_encoder()
        if not isinstance(users, Sequence) or not all(isinstance(user, Mapping) for user in users):
            source = open_table(users, table_config(self.options.data))
            columns = [name for name in source.names if name in wanted]
            users = [row for job in source.jobs(columns) for row in python_rows(job().table)]
        others = dict.fromkeys(name for name in encoder.schema.layout(with_label=False).names if name not in wanted)
        # Names that the schema lacks stay, by which a misspelled one is told.
        rows = [{**user, **others} for user in users]
        return Rows(Rows(found) for batch in self._batches(rows, encoder) for found in self.items(batch, k))

    @torch.no_grad()
    def items(self, users: FeatureBatch, k: int) -> list[list[dict[str, Any]]]:
        """The k best items for users encoded by `user_encoder`."""
        return self.search(*self.queries(users), k)

    @torch.no_grad()
    def queries(self, users: FeatureBatch) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """User vectors [B, dim], and catalogue indices [B, L] of items to exclude (-1: none)."""
        finding, catalogue, _ = self._ready()
        found = finding.user_vectors(self.model, users).float()
        _check_finite(found)
        vectors = found.cpu().numpy()
        if not self.options.retrieval.exclude_seen:
            return vectors, np.zeros((len(vectors), 0), np.int64)
        return vectors, catalogue.history_indices(users, finding.histories)

    def search(self, vectors: NDArray[np.float32], seen: NDArray[np.int64], k: int) -> list[list[dict[str, Any]]]:
        """The k best items for each vector [B, dim], without those at indices `seen` [B, L]."""
        _, catalogue, index = self._ready()
        # Search more items, so that k are left after the exclusion.
        wanted = min(k + seen.shape[1], len(catalogue))
        scores, item_indices = index.search(np.ascontiguousarray(vectors), wanted)
        answers = []
        for row, row_scores, own in zip(item_indices, scores, seen, strict=True):
            chosen = np.flatnonzero(~np.isin(row, own))[:k]
            found = zip(row[chosen].tolist(), row_scores[chosen].tolist(), strict=True)
            answers.append([{"item": catalogue.item(at), "score": score} for at, score in found if at >= 0])
        return answers

    def indices_of(self, items: Sequence[int | str]) -> NDArray[np.int64]:
        """The catalogue indices of items, given as in the data; -1 if absent."""
        finding, catalogue, _ = self._ready()
        feature = finding.item_feature
        keys = keys_of(items, self.encoder.schema.column_of(feature).kind)
        item_indices = catalogue.indices_of(torch.from_numpy(self.encoder.ids_of(feature, keys)))
        return np.where((item_indices >= 0) & (catalogue.keys[item_indices] == keys), item_indices, -1)

    @property
    def is_scored(self) -> bool:
        """Whether rows get a score."""
        return OBJECTIVES[self.model.config.objective].is_scored

    @property
    def is_retrieval(self) -> bool:
        """Whether this is a retrieval family."""
        return self._retrieval is not None

    @torch.no_grad()
    def save_index(self, folder: str | Path) -> None:
        """Write items.faiss, the index of the item vectors, and items.safetensors, the catalogue."""
        _, catalogue, index = self._ready()
        save_index(Path(folder) / INDEX, index)
        save_item_catalog(Path(folder) / ITEMS, catalogue)

    def _ready(self) -> tuple[RetrievalObjective[Any], ItemCatalog, Any]:
        if self._retrieval is None or self.model.item_catalog is None:
            raise ModelError(
                "this family finds no items, it scores rows",
                got=self.model.config.family,
                expected="a two_tower or a sasrec",
                fix="call the pipeline with rows",
            )
        if self._index is None:
            self._index = self._load_or_build(self._retrieval, self.options.retrieval.index)
        return self._retrieval, self.model.item_catalog, self._index

    @torch.no_grad()
    def _load_or_build(self, retrieval: RetrievalObjective[Any], kind: str) -> Any:
        """The index of the items, cached in RUN/serving."""
        if self.model.checkpoint_folder is None:
            return self._build_index(retrieval)
        mark = fingerprint_of("index", kind, self.options.tables.serving_dtype, getattr(faiss(), "__version__", ""))
        path = serving_folder(self.model.checkpoint_folder) / f"items-{mark[:12]}.faiss"
        if path.exists():
            index = faiss().deserialize_index(np.fromfile(path, np.uint8))
        else:
            index = self._build_index(retrieval)
            try:
                save_index(path, index)
            except OSError as error:
                _log.warning("the index of items is not kept: %s", error)
        set_search(index, self.options.retrieval)
        return index

    def _build_index(self, retrieval: RetrievalObjective[Any]) -> Any:
        """Build the index. If it is approximate, measure and log its recall."""
        vectors, options = retrieval.item_vectors(self.model), self.options.retrieval
        index = build_index(vectors, options.index)
        set_search(index, options)
        if options.index != "Flat":
            recall = index_recall(index, vectors, options.top_k)
            words = "recall@%d of the index %s is %.3f of an exact search, over item vectors as queries%s"
            fix = "; raise retrieval.nprobe or retrieval.ef_search, or take retrieval.index=Flat"
            more = fix if recall < 0.9 else ""
            _log.log(WARNING if more else INFO, words, options.top_k, options.index, recall, more)
        return index

    def scoring_encoder(self) -> FeatureEncoder:
        """The encoder without the group column, which scoring does not need."""
        return FeatureEncoder(dataclasses.replace(self.encoder.schema, group=None), self.encoder.statistics)

    def user_encoder(self) -> tuple[FeatureEncoder, set[str]]:
        """The encoder of users and the columns that it needs; all other columns are empty."""
        finding, _, _ = self._ready()
        names = {name.removesuffix(MISSING_SUFFIX) for name in finding.user_features}
        schema = self.encoder.schema
        # Features that are not the user's are missing in all rows.
        optional = {
            name: item if name in names else dataclasses.replace(item, missing="own")
            for name, item in schema.categorical.items()
        }
        asked = dataclasses.replace(schema, categorical=optional, group=None)
        return FeatureEncoder(asked, self.encoder.statistics), {schema.source_column(name) for name in names}

    def _batches(self, rows: Any, encoder: FeatureEncoder | None = None) -> list[FeatureBatch]:
        encoder = encoder or self.encoder
        source = open_table(rows, table_config(self.options.data)).with_known(self.encoder.schema.known_columns)
        layout = encoder.schema.layout(with_label=False)
        table = load_table(source, layout, default_root(), BadRows(policy=self.options.data.on_invalid))
        starts = range(0, table.num_rows, ROWS_AT_ONCE)
        parts = (np.arange(start, min(start + ROWS_AT_ONCE, table.num_rows)) for start in starts)
        return [encoder.encode(NamedColumns(table.rows(part), layout)) for part in parts]


def _rows_of(given: Any) -> tuple[Any, bool]:
    """What a table can be opened of, and whether it is one row: a mapping, or a Series of pandas, which is the row of a
    frame. Records of NumPy are columns by name, and an iterator of rows is a list."""
    if isinstance(given, Mapping) or (hasattr(given, "to_dict") and getattr(given, "ndim", None) == 1):
        return [given if isinstance(given, Mapping) else given.to_dict()], True
    names = given.dtype.names if isinstance(given, np.ndarray) else None
    if names:
        return {name: given[name] for name in names}, False
    return list(given) if isinstance(given, Iterator) else given, False


def _check_finite(values: Tensor) -> None:
    if not (is_finite := values.isfinite().reshape(len(values), -1).all(1)).all():
        raise ModelError(
            "the model gives no score",
            got=f"NaN or infinite values for {int((~is_finite).sum()):,} of {len(values):,} rows",
            expected="finite scores",
            fix="look for values unlike those of training; where all rows fail, the training has diverged: take an "
            "earlier checkpoint, or train with a smaller optimizer.learning_rate",
        )


def build_index(vectors: Tensor, kind: str) -> Any:
    """A faiss inner-product index of vectors [I, dim]. Raises DependencyError without faiss, and ConfigError for an
    unknown index string or too few items."""
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


def set_search(index: Any, options: RetrievalOptions) -> None:
    """Set nprobe and efSearch. Raises ConfigError if the index has no such parameter."""
    for name, words in (("nprobe", "nprobe"), ("ef_search", "efSearch")):
        value = getattr(options, name)
        if value is None:
            continue
        try:
            faiss().ParameterSpace().set_index_parameter(index, words, value)
        except RuntimeError as error:
            raise ConfigError(
                f"the index {options.index!r} has no {words}",
                got=f"retrieval.{name}={value}",
                expected="an index that is a graph (HNSW32)"
                if name == "ef_search"
                else "one with clusters (IVF64,Flat)",
                fix=f"leave retrieval.{name} out, or name another retrieval.index",
            ) from error


def index_recall(index: Any, vectors: Tensor, k: int) -> float:
    """Recall@k of an index over vectors [I, dim] against exact search, with up to 256 evenly
    spaced items as queries."""
    values = np.ascontiguousarray(vectors.float().cpu().numpy())
    queries = values[np.linspace(0, len(values) - 1, min(256, len(values))).astype(np.int64)]
    k = min(k, len(values))
    _, approximate = index.search(queries, k)
    products = queries @ values.T
    exact = np.argpartition(-products, k - 1, axis=1)[:, :k]
    hits = sum(len(np.intersect1d(one, other)) for one, other in zip(approximate, exact, strict=True))
    return hits / (k * len(queries))
