"""Full and incremental saving of tables."""

from collections.abc import Mapping
from pathlib import Path

from kitforge.core.checkpoint.manifest import MANIFEST, FileEntry, ParentStep, TableEntry, step_folder
from kitforge.core.checkpoint.table_writer import TableWriter
from kitforge.core.optim.table_protocols import RowSource, RowTable
from kitforge.foundation.config import check
from kitforge.foundation.files import sha256


class IncrementalTables:
    """Takes snapshots of tables, full or incremental, and tracks the parent of the next increment.

    At most `num_deltas` incremental steps follow a full one. The first step of a process is full.
    """

    def __init__(self, tables: Mapping[str, RowTable], num_deltas: int = 0) -> None:
        check(num_deltas >= 0, "num_deltas", num_deltas, "0 or more")
        self._tables = dict(tables)
        self._num_deltas = num_deltas
        self._sources: dict[str, RowSource] = {}
        self._versions: dict[str, int] = {}
        self._last: ParentStep | None = None
        self._num_since_whole = 0
        self.base: ParentStep | None = None  # of the step that is being saved

    @property
    def kind(self) -> str:
        """The kind of saving, for messages."""
        return f" and the rows of {', '.join(sorted(self._tables))}" if self._tables else ""

    def begin(self, step: int) -> None:
        """Take snapshots of all tables."""
        can_build = self._last is not None and self._last.step < step and self._num_since_whole < self._num_deltas
        # A table reports removed ids once. If this step is not published, the next one must save all rows.
        self.base, self._last = self._last if can_build else None, None
        try:
            for name, table in self._tables.items():
                since = None if self.base is None else self._versions[name]
                self._sources[name] = table.begin_snapshot(since, is_base=self._num_deltas > 0)
        except BaseException:
            self.close()
            raise
        self._versions = {name: source.version for name, source in self._sources.items()}

    def write(self, draft: Path, step: int, rank: int | None) -> tuple[tuple[FileEntry, ...], tuple[TableEntry, ...]]:
        """Write the snapshots and release them."""
        files = TableWriter(draft, step, rank)
        files.write(self._sources)
        self.close()
        return tuple(files.files), tuple(files.tables)

    def published(self, root: Path, step: int) -> None:
        """The step is published and may be a parent."""
        # Only the rank that publishes needs the checksum; to another the manifest may not be visible yet.
        manifest = step_folder(root, step) / MANIFEST
        self._last = ParentStep(step=step, sha256=sha256(manifest) if manifest.is_file() else "")
        self._num_since_whole = 0 if self.base is None else self._num_since_whole + 1

    def close(self) -> None:
        """Release the snapshots."""
        for source in self._sources.values():
            source.close()
        self._sources = {}
