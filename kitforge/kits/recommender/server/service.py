"""The recommender behind the HTTP server: batches requests, and takes over newer checkpoints while it answers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.manifest import MANIFEST, step_folder, steps
from kitforge.foundation.errors import CheckpointError, ConfigError, KitforgeError
from kitforge.foundation.files import sha256
from kitforge.foundation.log import logger
from kitforge.inference.server.application import HttpService
from kitforge.inference.server.batcher import DynamicBatcher
from kitforge.inference.server.metrics import BatchMetrics
from kitforge.kits.recommender.artifacts import find_features
from kitforge.kits.recommender.batch import FeatureBatch
from kitforge.kits.recommender.config import RecommenderServeOptions
from kitforge.kits.recommender.data import table_config
from kitforge.kits.recommender.pipeline import RecommendationPipeline
from kitforge.kits.recommender.server.requests import RowReader
from kitforge.kits.recommender.serving import refreshed
from kitforge.kits.recommender.unknown_values import UnknownValues

_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A served step. `marks`: checksums of the manifests of its increment chain by folder, the newest first."""

    step: int
    pipeline: RecommendationPipeline
    marks: dict[Path, str]

    @property
    def mark(self) -> str:
        """The checksum of the step, which differs from another step with this number."""
        return next(iter(self.marks.values()))


def marks_of(checkpoint: Checkpoint) -> dict[Path, str]:
    """The checksums of the manifests of an increment chain, by folder."""
    return {link.folder: sha256(link.folder / MANIFEST) for link in checkpoint.increments}


class Refresher:
    """Polls the checkpoint folder on a thread between `start` and `stop`."""

    def __init__(self, service: RecommenderService, root: Path, seconds: float) -> None:
        self._service = service
        self._root = root
        self._seconds = seconds
        self._skipped: dict[Path, object] = {}  # unusable folders, and the state of their files
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refresh", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling, after the check in progress."""
        self._has_ended.set()
        self._thread.join()

    def look(self) -> None:
        """Serve the newest valid checkpoint, if it is newer than the served one. An invalid one is logged once for each
        state of its files, and the served version stays."""
        served, result = self._service.version, None
        for step in reversed(steps(self._root)):
            folder = step_folder(self._root, step)
            if (
                step < served.step
                or result not in (None, step)
                or self._skipped.get(folder) == (state := _state(folder))
            ):
                continue
            try:
                if sha256(folder / MANIFEST) == served.mark:
                    return
                links = open_checkpoint(folder, verify=False)
                # A run that stopped early serves its best step, not the last.
                best = links.state["training"]["result_step"]
                if result is None and best not in (None, step):
                    result = best
                    continue
                newer = self._opened(links, served)
            except (KitforgeError, OSError) as error:
                self._skipped[folder] = state
                self._service.metrics.refresh_failures.inc()
                _log.warning("step %d is not taken over, step %d goes on to answer: %s", step, served.step, error)
                continue
            self._service.take_over(newer)
            return

    def _opened(self, links: Checkpoint, served: Version) -> Version:
        folder = links.folder
        marks = marks_of(links)
        # Files of the served version are verified already.
        verified = [path for path, mark in marks.items() if served.marks.get(path) == mark]
        checkpoint = open_checkpoint(folder, parts=("model",), verified=verified)
        model = served.pipeline.model
        if find_features(folder).fingerprint != served.pipeline.encoder.fingerprint:
            raise CheckpointError("the features of the run are others now", fix="start the server again")
        # The number of increments after the served step.
        paths = list(marks)
        own = next(iter(served.marks))
        num_newer = paths.index(own) if marks.get(own) == served.mark else len(paths)
        newer = refreshed(model, checkpoint, num_newer, "O1")
        pipeline = RecommendationPipeline(newer, served.pipeline.encoder, served.pipeline.options)
        if pipeline.is_retrieval:
            # Build the item index now, while the older version answers.
            pipeline.user_encoder()
        return Version(step=checkpoint.step, pipeline=pipeline, marks=marks)

    def _run(self) -> None:
        while not self._has_ended.wait(self._seconds):
            try:
                self.look()
            except Exception:  # noqa: BLE001 (the served version stays on any error)
                _log.exception("the checkpoints of the run could not be looked at")


def _state(folder: Path) -> object:
    """A value that changes with the files of a folder."""
    try:
        return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    except OSError as error:
        return str(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A request: scores of its rows, or the k best items for each (`k`), without the catalogue indices `excluded`
    [B, E]."""

    batch: FeatureBatch
    k: int | None = None
    excluded: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringReply:
    """A reply: the served step, and a score or a list of items for each row."""

    step: int
    rows: list[Any]


Batcher: TypeAlias = DynamicBatcher[Query, ScoringReply]


class RecommenderService(HttpService):
    """The state of the server. A batch uses one version throughout, so a request sees one checkpoint."""

    limits: RecommenderServeOptions
    metrics: BatchMetrics
    worker: Batcher

    def __init__(self, pipeline: RecommendationPipeline, name: str) -> None:
        limits = pipeline.options.serve
        origin = pipeline.model.checkpoint_folder
        if origin is None:
            raise ConfigError("a model in memory is not served", fix="name the run: checkpoint=RUN")
        super().__init__(name, limits, BatchMetrics())
        checkpoint = open_checkpoint(origin, verify=False)
        self.version = Version(step=checkpoint.step, pipeline=pipeline, marks=marks_of(checkpoint))
        self.metrics.step = checkpoint.step
        schema, cells = pipeline.encoder.schema, table_config(pipeline.options.data).cells
        self.row_reader: RowReader | None = None
        self.user_reader: RowReader | None = None
        if pipeline.is_scored:
            encoder = pipeline.scoring_encoder()
            names = encoder.schema.layout(with_label=False).names
            self.row_reader = RowReader(encoder, names, schema.known_columns, limits.max_rows, cells)
        if pipeline.is_retrieval:
            encoder, wanted = pipeline.user_encoder()
            self.user_reader = RowReader(encoder, wanted, schema.known_columns, limits.max_rows, cells)
        self._unknown, self._warned = UnknownValues(pipeline.encoder, pipeline.model), set[str]()
        self.worker = DynamicBatcher(
            self.answer, self.metrics, max_rows=limits.max_batch_rows, max_wait_ms=limits.max_wait_ms
        )
        seconds = limits.refresh_seconds
        refreshers = () if seconds is None else (Refresher(self, origin.parent, seconds),)
        self.threads = (self.worker, *refreshers)

    def status(self) -> dict[str, Any]:
        return {"model": self.name, "step": self.version.step}

    async def rendered_metrics(self) -> tuple[bytes, str]:
        self.metrics.num_live = self.num_active
        return self.metrics.rendered()

    def take_over(self, version: Version) -> None:
        """Serve another version from the next batch on."""
        _log.info("step %d answers in the place of step %d", version.step, self.version.step)
        self.version = version
        self._unknown.model = version.pipeline.model
        self.metrics.step = version.step
        self.metrics.refreshes.inc()

    @torch.no_grad()
    def answer(self, queries: Sequence[Query]) -> list[ScoringReply]:
        """The replies to a batch of queries, all by one version."""
        version = self.version
        for query in queries:
            self._unknown.add(query.batch)
        self._unknown.warn("requests", self._warned)
        self.metrics.unknown_shares = self._unknown.shares()
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
    """The items for all users of the queries. Queries with equal k are searched together, so the results of an
    approximate index do not depend on other queries."""
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
