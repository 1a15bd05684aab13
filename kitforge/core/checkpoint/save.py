"""Asynchronous checkpointing: a copy in memory in the foreground, writing in the background.

This file knows named tensors and plain state only. Guarantee: whenever a process dies, the folder of every published
step is complete, and a published step stays until a newer one is published. Each rank writes the shards that it owns to
a shared folder; rank 0 publishes and deletes.
"""

import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from kitforge.core.checkpoint.all_or_none import all_gather_or_explain, collective_try, local_try
from kitforge.core.checkpoint.cleanup import clean, set_aside
from kitforge.core.checkpoint.incremental_tables import IncrementalTables
from kitforge.core.checkpoint.manifest import KEEP, step_folder, steps
from kitforge.core.checkpoint.shard_writer import Written, write_files, write_manifest_of
from kitforge.core.checkpoint.snapshot import Snapshot
from kitforge.core.checkpoint.table_reader import parent_of
from kitforge.core.optim.table_protocols import RowTable
from kitforge.core.parallel import collectives
from kitforge.core.parallel.layout import Layout
from kitforge.core.parallel.world import ALONE, World
from kitforge.foundation.config import check
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import atomic_folder
from kitforge.foundation.log import logger

_log = logger(__name__)
T = TypeVar("T")


class CheckpointWriter:
    """Writes the steps of one run below `root`; one write at a time, in one background thread.

    `keep_last` newest steps are kept, and those that are protected. `asynchronous=False` returns from `save` when the
    step is published. A shard larger than `shard_bytes` holds a single tensor.

    In a `world` of many ranks, all of them make the writer and call its methods, in the same order. What fails on one
    is raised on all, at their next call.
    """

    def __init__(
        self,
        root: Path,
        *,
        keep_last: int = 3,
        asynchronous: bool = True,
        shard_bytes: int = 2 * 2**30,
        world: World = ALONE,
    ) -> None:
        check(keep_last >= 1, "keep_last", keep_last, "at least 1")
        check(shard_bytes >= 1, "shard_bytes", shard_bytes, "at least 1")
        self._root = root
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._shard_bytes = shard_bytes
        self._rank = world.rank
        group = None if world.mesh is None else world.mesh.new_cpu_group()
        self._agree: Callable[[Any], list[Any]] = partial(collectives.all_gather_object, group=group)
        self._gather: Callable[[Any], list[Any]] = partial(collectives.gather_object, group=group)
        self._is_alone = world.mesh is None
        self._snapshot = Snapshot()
        if world.mesh is not None:
            has_stages = world.mesh.degree("pipeline") > 1
            self._snapshot = Snapshot(world.mesh.grid, world.rank, self._agree if has_stages else None)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        # Guards the set of kept steps, which `pin` and the background thread both change.
        self._lock = threading.Lock()
        self._protected: set[int] = set()
        # Steps that keep their protection until the one that is being written is published.
        self._to_release: set[int] = set()
        self._is_published = True
        self._tables = IncrementalTables({})
        # By step, the one that it builds on.
        self._bases: dict[int, int | None] = {}
        if self._rank == 0:
            clean(root)

    def attach(self, tables: Mapping[str, RowTable], *, num_deltas: int = 0) -> None:
        """Save the rows of these tables with every step from now on.

        After a step with all rows come at most `num_deltas` steps with those that changed since the step before; a step
        stays as long as one that is kept builds on it. Call it again when the tables have become others.
        """
        self.wait()
        self._tables = IncrementalTables(tables, num_deltas)

    def save(
        self,
        step: int,
        *,
        model: Iterable[tuple[str, Tensor]],
        optimizer: Iterable[tuple[str, Tensor]],
        state: Mapping[str, Any],
        keep: bool = False,
        layouts: Mapping[str, Layout] = {},
    ) -> None:
        """Wait for the write before, copy everything, and write it in the background; `keep` protects the step.

        Names are distinct over model and optimizer. Of many ranks, each gives its piece of the tensors in `layouts`;
        a tensor that is not there is whole and equal on all ranks. The state is that of the first rank.
        Raises CheckpointError when the write before this one failed.
        """
        self.wait()
        try:
            self._snapshot.take(step, model=model, optimizer=optimizer, state=state, layouts=layouts)
            self._tables.begin(step)
        except CheckpointError as refusal:
            if not self._is_alone:
                # The other ranks are about to write and must be notified.
                self._pending = self._executor.submit(self._write, refusal)
                self.wait()
            raise
        # A step that is saved again stays protected if it was.
        if keep or (step_folder(self._root, step) / KEEP).exists():
            self._protected.add(step)
        self._to_release.clear()
        self._is_published = False
        self._pending = self._executor.submit(self._write)
        if not self._asynchronous:
            self.wait()

    def pin(self, step: int) -> None:
        """Keep that step, published or being written, until `release`; a later process keeps it too."""
        with self._lock:
            folder = step_folder(self._root, step)
            is_being_written = self._pending is not None and self._snapshot.step == step
            if not folder.is_dir() and not is_being_written:
                raise CheckpointError(f"there is no step {step} to protect", got=steps(self._root))
            self._protected.add(step)
            self._to_release.discard(step)
            if folder.is_dir() and self._rank == 0:
                (folder / KEEP).touch()

    def unpin(self, step: int) -> None:
        """Stop protecting that step, but not before the write in progress is published: the new best
        step is on the disk before the previous one may be deleted."""
        with self._lock:
            self._protected.discard(step)
            if self._pending is not None and not self._is_published:
                self._to_release.add(step)
            elif self._rank == 0:
                (step_folder(self._root, step) / KEEP).unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait for the write in progress. Raises CheckpointError, once, if the last write failed."""
        if self._pending is None:
            return
        # An interrupt while waiting leaves the write pending: its buffers are still being read.
        failure = self._pending.exception()
        self._pending = None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Finish the last write and free the buffers. Raises CheckpointError if it failed."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._snapshot = Snapshot()

    def abandon(self, patience: float) -> None:
        """Wait at most `patience` seconds for the last write, then leave it to itself, for the others wait until a rank
        that failed has ended. A step that is not published by then does not appear."""
        if self._pending is not None:
            futures.wait([self._pending], timeout=patience)
        self._executor.shutdown(wait=False)

    def _write(self, refusal: CheckpointError | None = None) -> None:
        # Whatever fails, on whichever rank, the draft vanishes on the way out, and the tables are let go.
        with ExitStack() as stack:
            stack.callback(self._tables.close)
            draft = collective_try(self._reporting(partial(self._begin, stack, refusal)), self._agree)[0]
            write = local_try(self._reporting(partial(self._write_files, self._root / draft)), self._agree)
            # The entries of many ranks are large, so only the first rank publishes them.
            written = all_gather_or_explain(write, self._gather)
            collective_try(self._reporting(partial(self._publish, stack, self._root / draft, written)), self._agree)
        self._tables.published(self._root, self._snapshot.step)

    def _reporting(self, work: Callable[[], T]) -> Callable[[], T]:
        def reporting() -> T:
            try:
                return work()
            except OSError as cause:
                raise self._failed(cause) from cause

        return reporting

    def _begin(self, stack: ExitStack, refusal: CheckpointError | None) -> str:
        """The name of the draft folder, created by rank 0."""
        if refusal is not None:
            raise refusal
        if self._rank != 0:
            return ""
        return stack.enter_context(atomic_folder(step_folder(self._root, self._snapshot.step))).name

    def _write_files(self, draft: Path) -> Written:
        if not draft.is_dir():
            raise CheckpointError(
                f"rank {self._rank} does not see {draft}, which rank 0 has made",
                fix="let all ranks save to a folder of a file system that they share",
            )
        rank = None if self._is_alone else self._rank
        written = write_files(draft, self._snapshot, self._shard_bytes, rank)
        files, tables = self._tables.write(draft, self._snapshot.step, rank)
        return replace(written, files=written.files + files, tables=tables)

    def _publish(self, stack: ExitStack, draft: Path, written: list[Written]) -> None:
        if self._rank != 0:
            return
        if self._snapshot.step in self._protected:
            (draft / KEEP).touch()
        write_manifest_of(draft, self._snapshot, written, self._tables.base)
        stack.close()
        self._bases[self._snapshot.step] = None if self._tables.base is None else self._tables.base.step
        self._delete_old(step_folder(self._root, self._snapshot.step))

    def _delete_old(self, published: Path) -> None:
        """Delete old steps; steps after the published one are not of this run's history and stay."""
        with self._lock:
            # The step may have been protected or released while it was being written.
            if self._snapshot.step in self._protected:
                (published / KEEP).touch()
            else:
                (published / KEEP).unlink(missing_ok=True)
            self._is_published = True
            for step in self._to_release:
                (step_folder(self._root, step) / KEEP).unlink(missing_ok=True)
            older = [step for step in steps(self._root) if step < self._snapshot.step]
            num_beyond = max(0, len(older) - self._keep_last + 1)
            folders = {step: step_folder(self._root, step) for step in older}
            kept = [step for step in older[:num_beyond] if (folders[step] / KEEP).exists()]
            stay = self._with_parents([*older[num_beyond:], *kept, self._snapshot.step])
            try:
                # The newest goes first, for it may build on one before it.
                asides = [set_aside(folders[step]) for step in reversed(older) if step not in stay]
                for aside in asides:
                    shutil.rmtree(aside)
            # The new step is published; failing to delete an old one is not a failed save.
            except OSError as cause:
                _log.warning("an old checkpoint below %s could not be deleted: %s", self._root, cause)

    def _with_parents(self, some: Sequence[int]) -> set[int]:
        """The steps with their parents, which are read once."""
        found: set[int] = set()
        for first in some:
            step: int | None = first
            while step is not None and step not in found:
                found.add(step)
                if step not in self._bases:
                    self._bases[step] = parent_of(self._root, step)
                step = self._bases[step]
        return found

    def _failed(self, cause: OSError) -> CheckpointError:
        existing = next(folder for folder in (self._root, *self._root.absolute().parents) if folder.is_dir())
        published = steps(self._root)
        return CheckpointError(
            f"{step_folder(self._root, self._snapshot.step)} could not be written: {cause}",
            got=f"{shutil.disk_usage(existing).free:,} bytes free",
            expected=f"{self._snapshot.num_bytes:,} bytes{self._tables.kind}",
            fix="make room, or save elsewhere"
            + (f"; the last good checkpoint is {step_folder(self._root, published[-1])}" if published else ""),
        )
