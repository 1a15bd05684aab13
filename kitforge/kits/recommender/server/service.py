"""A recommender that is asked over HTTP: the version that answers, the batches that it answers, and how much may be
asked at once. Knows no routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.log import logger
from kitforge.inference.server.authentication import auth_tokens
from kitforge.inference.server.batcher import DynamicBatcher
from kitforge.inference.server.bodies import BodyBuffers
from kitforge.inference.server.errors import queue_full
from kitforge.inference.server.metrics import BatchMetrics
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.pipeline import RecommendationPipeline
from kitforge.kits.recommender.server.refresh import Refresher, Version, marks_of
from kitforge.kits.recommender.server.requests import RowReader
from kitforge.models.sasrec.model import SASRec

_log = logger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a request asks for: chances of its rows, or the k items for each, without those at the places `excluded`
    [B, E]."""

    batch: FeatureBatch
    k: int | None = None
    excluded: NDArray[np.int64] | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringReply:
    """The step that answered, and a score or a list of items for each row."""

    step: int
    rows: list[Any]


Batcher: TypeAlias = DynamicBatcher[Query, ScoringReply]


@final
class ScoringWorker:
    """The batcher, and what refreshes its model."""

    def __init__(self, batcher: Batcher, refresher: Refresher | None) -> None:
        self._batcher = batcher
        self._refresher = refresher
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] | None = None

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._batcher.on_failure = self._fail
        self._batcher.start()
        if self._refresher is not None:
            self._refresher.start()

    def stop(self) -> None:
        """End after the work under way."""
        if self._refresher is not None:
            self._refresher.stop()
        self._batcher.stop()

    def _fail(self) -> None:
        self.failure = self._batcher.failure
        if self.on_failure is not None:
            self.on_failure()


@final
class RecommenderService:
    """See the module. Every batch is answered by the version that is there when it begins, so a request sees one."""

    def __init__(self, pipeline: RecommendationPipeline, name: str) -> None:
        limits = self.limits = pipeline.options.serve
        origin = pipeline.model.checkpoint_folder
        if origin is None:
            raise ConfigError("a model in memory is not served", fix="name the run: checkpoint=RUN")
        self.name = limits.name or name
        self.auth_tokens = auth_tokens(limits)
        self.metrics = BatchMetrics()
        self.bodies = BodyBuffers(limits)
        checkpoint = open_checkpoint(origin, verify=False)
        self.version = Version(step=checkpoint.step, pipeline=pipeline, marks=marks_of(checkpoint))
        self.metrics.step = checkpoint.step
        schema = pipeline.encoder.schema
        ignored = [name for name in (schema.label and schema.label.name, schema.group) if name]
        self.row_reader: RowReader | None = None
        self.user_reader: RowReader | None = None
        if not isinstance(pipeline.model.network, SASRec):
            encoder = pipeline.scoring_encoder()
            names = encoder.schema.layout(with_label=False).names
            self.row_reader = RowReader(encoder, names, ignored, limits.max_rows)
        if pipeline.is_retrieval:
            encoder, wanted = pipeline.user_encoder()
            others = [*ignored, *schema.layout(with_label=False).names]
            self.user_reader = RowReader(encoder, wanted, others, limits.max_rows)
        self.batcher: Batcher = DynamicBatcher(
            self.answer, self.metrics, max_rows=limits.max_batch_rows, max_wait_ms=limits.max_wait_ms
        )
        seconds = limits.refresh_seconds
        refresher = None if seconds is None else Refresher(self, origin.parent, seconds)
        self.worker = ScoringWorker(self.batcher, refresher)

    def check_capacity(self) -> None:
        """Raise ApiError where one request more is too much at once."""
        if self.metrics.num_live >= self.limits.max_requests:
            raise queue_full(self.limits.max_requests, "requests")

    def take_over(self, version: Version) -> None:
        """Answer by another version from the next batch on."""
        _log.info("step %d answers in the place of step %d", version.step, self.version.step)
        self.version = version
        self.metrics.step = version.step
        self.metrics.refreshes.inc()

    @torch.no_grad()
    def answer(self, queries: Sequence[Query]) -> list[ScoringReply]:
        """The replies to the queries of a batch, all by one version."""
        version = self.version
        replies: list[ScoringReply | None] = [None] * len(queries)
        for answer, is_wanted in ((_scored, False), (_found, True)):
            numbers = [number for number, query in enumerate(queries) if (query.k is not None) == is_wanted]
            if not numbers:
                continue
            chosen = [queries[number] for number in numbers]
            rows = answer(version.pipeline, chosen)
            for number, query in zip(numbers, chosen, strict=True):
                replies[number] = ScoringReply(step=version.step, rows=rows[: len(query.batch)])
                rows = rows[len(query.batch) :]
        return [reply for reply in replies if reply is not None]


def _scored(pipeline: RecommendationPipeline, queries: Sequence[Query]) -> list[Any]:
    scores: list[Any] = pipeline.scores(FeatureBatch.concatenate([query.batch for query in queries])).tolist()
    return scores


def _found(pipeline: RecommendationPipeline, queries: Sequence[Query]) -> list[Any]:
    """The items for all users of the queries. Users are searched for together where they ask for as many items, so
    that what an approximate index finds does not depend on others."""
    vectors, seen = pipeline.queries(FeatureBatch.concatenate([query.batch for query in queries]))
    groups: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    excluded: list[NDArray[np.int64]] = []
    start = 0
    for query in queries:
        rows = np.arange(start, start := start + len(query.batch))
        own = np.zeros((len(rows), 0), np.int64) if query.excluded is None else query.excluded
        excluded += list(own)
        groups.setdefault((query.k or 1, own.shape[1]), []).append(rows)
    found: list[Any] = [None] * len(vectors)
    for (k, _), parts in groups.items():
        rows = np.concatenate(parts)
        without = np.concatenate([seen[rows], np.stack([excluded[row] for row in rows])], axis=1)
        for row, items in zip(rows, pipeline.search(vectors[rows], without, k), strict=True):
            found[row] = items
    return found
