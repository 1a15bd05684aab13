"""Saving while training goes on: one memory copy in the foreground, the disk in the background.

This file knows no optimizer and no model, only named tensors and plain state. Its promise: whenever the process dies,
the folder of every published step is whole, and a step that was published stays until a newer one is.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from torch import Tensor

from kitforge.core.checkpoint import tensor_file
from kitforge.core.checkpoint.layout import (
    FORMAT_VERSION,
    KEEP,
    PARTS,
    STATE,
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    step_folder,
    steps,
    write_manifest,
)
from kitforge.core.checkpoint.leftovers import clean, set_aside
from kitforge.core.checkpoint.snapshot import Snapshot
from kitforge.foundation.config import check
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import atomic_file, atomic_folder
from kitforge.foundation.log import logger

_log = logger(__name__)


@final
class CheckpointWriter:
    """Writes the steps of one run below `root`; one write at a time, in one background thread.

    `keep_last` newest steps are kept, and those that are protected. `asynchronous=False` returns from `save` when the
    step is published. A shard larger than `shard_bytes` holds a single tensor. `kind` is noted in the manifest.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int = 3,
        asynchronous: bool = True,
        shard_bytes: int = 2 * 2**30,
        kind: str = "training",
    ) -> None:
        check(keep_last >= 1, "keep_last", keep_last, "at least 1")
        check(shard_bytes >= 1, "shard_bytes", shard_bytes, "at least 1")
        self._root = root
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._shard_bytes = shard_bytes
        self._kind = kind
        self._snapshot = Snapshot()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        # Guards what `protect` and the background thread both decide: which steps stay.
        self._lock = threading.Lock()
        self._protected: set[int] = set()
        clean(root)

    def save(
        self,
        step: int,
        *,
        model: Iterable[tuple[str, Tensor]],
        optimizer: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
        keep: bool = False,
    ) -> None:
        """Wait for the write before, copy everything, and write it in the background; `keep` protects the step.

        Names are distinct over model and optimizer. Raises CheckpointError when the write before this one failed.
        """
        self.wait()
        self._snapshot.take(step, model=model, optimizer=optimizer, state=state)
        # A step that is saved again stays protected if it was.
        if keep or (step_folder(self._root, step) / KEEP).exists():
            self._protected.add(step)
        self._pending = self._executor.submit(self._write)
        if not self._asynchronous:
            self.wait()

    def protect(self, step: int) -> None:
        """Keep that step, published or being written, until `release`; a later process keeps it too."""
        with self._lock:
            folder = step_folder(self._root, step)
            is_being_written = self._pending is not None and self._snapshot.step == step
            if not folder.is_dir() and not is_being_written:
                raise CheckpointError(f"there is no step {step} to protect", got=steps(self._root))
            self._protected.add(step)
            if folder.is_dir():
                (folder / KEEP).touch()

    def release(self, step: int) -> None:
        """Let that step go like any other once it is old."""
        with self._lock:
            self._protected.discard(step)
            (step_folder(self._root, step) / KEEP).unlink(missing_ok=True)

    def wait(self) -> None:
        """Return when nothing is being written. Raises CheckpointError, once, when the last write failed."""
        if self._pending is None:
            return
        # An interrupt while waiting leaves the write pending: its buffers are still being read.
        failure = self._pending.exception()
        self._pending = None
        if isinstance(failure, OSError):
            raise self._failed(failure) from failure
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish the last write and let the buffers go. Raises CheckpointError when that write failed."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._snapshot = Snapshot()

    def _write(self) -> None:
        snapshot = self._snapshot
        folder = step_folder(self._root, snapshot.step)
        with atomic_folder(folder) as draft:
            files, entries = [_write_state(draft, snapshot.state)], {}
            for part in PARTS:
                written, entries[part] = _write_part(draft, part, snapshot, self._shard_bytes)
                files += written
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                package_version=_package_version(),
                kind=self._kind,
                step=snapshot.step,
                model=tuple(entries["model"]),
                optimizer=tuple(entries["optimizer"]),
                files=tuple(files),
            )
            if snapshot.step in self._protected:
                (draft / KEEP).touch()
            write_manifest(draft, manifest)
        self._delete_old(folder)

    def _delete_old(self, published: Path) -> None:
        """Steps after the published one are not this run's past, and are let be."""
        with self._lock:
            # The step may have been protected or released while it was being written.
            if self._snapshot.step in self._protected:
                (published / KEEP).touch()
            else:
                (published / KEEP).unlink(missing_ok=True)
            older = [step for step in steps(self._root) if step < self._snapshot.step]
            beyond = older[: max(0, len(older) - self._keep_last + 1)]
            folders = [step_folder(self._root, step) for step in beyond]
            try:
                asides = [set_aside(folder) for folder in folders if not (folder / KEEP).exists()]
                for aside in asides:
                    shutil.rmtree(aside)
            # The new step is safe; that an old one could not be deleted must not look like a failed save.
            except OSError as cause:
                _log.warning("an old checkpoint below %s could not be deleted: %s", self._root, cause)

    def _failed(self, cause: OSError) -> CheckpointError:
        existing = next(folder for folder in (self._root, *self._root.absolute().parents) if folder.is_dir())
        published = steps(self._root)
        return CheckpointError(
            f"{step_folder(self._root, self._snapshot.step)} could not be written: {cause}",
            got=f"{shutil.disk_usage(existing).free:,} bytes free",
            expected=f"{self._snapshot.num_bytes:,} bytes",
            fix="make room, or save elsewhere"
            + (f"; the last good checkpoint is {step_folder(self._root, published[-1])}" if published else ""),
        )


def _write_part(
    draft: Path, part: Part, snapshot: Snapshot, shard_bytes: int
) -> tuple[list[FileEntry], list[TensorEntry]]:
    """Write the shards of one part; returns what the manifest says of files and of tensors."""
    stored = [(name, snapshot.buffers[name]) for name in snapshot.names[part] if name not in snapshot.aliases]
    shards = list(tensor_file.split(stored, shard_bytes))
    files: list[FileEntry] = []
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        path = draft / f"{part}-{number:05}-of-{len(shards):05}.safetensors"
        files.append(tensor_file.write(path, shard))
        places.update((name, path.name) for name, _ in shard)
    entries = []
    for name in snapshot.names[part]:
        alias_of = snapshot.aliases.get(name)
        buffer = snapshot.buffers[alias_of or name]
        entries.append(
            TensorEntry(
                name=name,
                dtype=tensor_file.DTYPE_NAMES[buffer.dtype],
                global_shape=tuple(buffer.shape),
                offset=(0,) * buffer.dim(),
                shape=tuple(buffer.shape),
                file=places[alias_of or name],
                alias_of=alias_of,
            )
        )
    return files, entries


def _write_state(draft: Path, state: bytes) -> FileEntry:
    with atomic_file(draft / STATE) as file:
        file.write(state)
    return FileEntry(name=STATE, bytes=len(state), sha256=tensor_file.checksum(state))


def _package_version() -> str:
    try:
        return importlib.metadata.version("kitforge")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
