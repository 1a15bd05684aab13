"""Newer checkpoints of the run that is served: found, verified, and made into a version beside the one that answers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from kitforge.core.checkpoint.load import Checkpoint, open_checkpoint
from kitforge.core.checkpoint.manifest import MANIFEST, step_folder, steps
from kitforge.foundation.errors import CheckpointError, KitforgeError
from kitforge.foundation.files import sha256
from kitforge.foundation.log import logger
from kitforge.inference.server.metrics import BatchMetrics
from kitforge.kits.recommender.artifacts import find_features
from kitforge.kits.recommender.pipeline import RecommendationPipeline
from kitforge.kits.recommender.serving import refreshed

_log = logger(__name__)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One step that answers. `marks` are the checksums of the manifests of the step and of those that it builds on,
    by their folders, the newest first."""

    step: int
    pipeline: RecommendationPipeline
    marks: dict[Path, str]

    @property
    def mark(self) -> str:
        """What tells the step from another of its number."""
        return next(iter(self.marks.values()))


class VersionedService(Protocol):
    """What answers by one version at a time."""

    metrics: BatchMetrics
    version: Version

    def take_over(self, version: Version) -> None:
        """Answer by another version from now on."""
        ...


def marks_of(checkpoint: Checkpoint) -> dict[Path, str]:
    """The checksums of the manifests of a step and of those that it builds on."""
    return {link.folder: sha256(link.folder / MANIFEST) for link in checkpoint.increments}


@final
class Refresher:
    """Looks at the folder of checkpoints every so many seconds, on a thread of its own between `start` and `stop`."""

    def __init__(self, service: VersionedService, root: Path, seconds: float) -> None:
        self._service = service
        self._root = root
        self._seconds = seconds
        self._skipped: dict[Path, object] = {}  # folders that were of no use, as their files were then
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="refresh", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """End after the look under way."""
        self._has_ended.set()
        self._thread.join()

    def look(self) -> None:
        """Take over the newest good checkpoint, if it is newer than what answers. One that is not good is logged, once
        for each state of its files, and what answers stays."""
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
                # Of a run that stopped early the best step counts, not the last.
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
        # What is served was verified when it was opened.
        verified = [path for path, mark in marks.items() if served.marks.get(path) == mark]
        checkpoint = open_checkpoint(folder, parts=("model",), verified=verified)
        model = served.pipeline.model
        if find_features(folder).fingerprint != served.pipeline.encoder.fingerprint:
            raise CheckpointError("the features of the run are others now", fix="start the server again")
        # As many links of the chain as came after the step that is served.
        paths = list(marks)
        own = next(iter(served.marks))
        num_newer = paths.index(own) if marks.get(own) == served.mark else len(paths)
        newer = refreshed(model, checkpoint, num_newer, "O1")
        pipeline = RecommendationPipeline(newer, served.pipeline.encoder, served.pipeline.options)
        if pipeline.is_retrieval:
            # The index of the items is made here, while the older version answers.
            pipeline.user_encoder()
        return Version(step=checkpoint.step, pipeline=pipeline, marks=marks)

    def _run(self) -> None:
        while not self._has_ended.wait(self._seconds):
            try:
                self.look()
            except Exception:  # noqa: BLE001 (whatever it is, what answers goes on)
                _log.exception("the checkpoints of the run could not be looked at")


def _state(folder: Path) -> object:
    """What changes when a file of a folder does, or a file comes or goes."""
    try:
        return sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    except OSError as error:
        return str(error)
