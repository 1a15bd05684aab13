"""Tables of a checkpoint: rows of a full step and its increments."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.manifest import MANIFEST, REMOVED, Manifest, TableEntry, plain, read_manifest, step_folder
from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.core.optim.row_optimizers import SparseModule
from kitforge.core.optim.table_protocols import ROWS, Chunk, RowShard, RowSource, RowTable, is_row_data
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.files import sha256

ALL: RowShard = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """A published step and its manifest."""

    folder: Path
    manifest: Manifest


def increment_chain(step: Increment) -> list[Increment]:
    """The step and its parents, newest first.

    Raises CheckpointError when one of them is missing or not the one that was built on.
    """
    links = [step]
    while (base := links[-1].manifest.parent) is not None:
        later, folder = links[-1].folder, step_folder(step.folder.parent, base.step)
        path = folder / MANIFEST
        if base.step >= links[-1].manifest.step or not path.is_file():
            raise CheckpointError(f"{later} builds on {folder}, which is not there", expected=path)
        if (got := sha256(path)) != base.sha256:
            raise CheckpointError(
                f"{folder} is not the step that {later} builds on", got=f"manifest {got}", expected=base.sha256
            )
        links.append(Increment(folder=folder, manifest=read_manifest(folder)))
    return links


def parent_of(root: Path, step: int) -> int | None:
    """The step that a published step builds on; None: on none, as far as its manifest can be read."""
    try:
        base = read_manifest(step_folder(root, step)).parent
    except CheckpointError:
        return None
    return None if base is None else base.step


class StoredTable(RowSource):
    """The rows of a table in a chain of steps, newest first."""

    def __init__(self, name: str, links: Iterable[Increment], shard: RowShard = ALL) -> None:
        self.name = name
        self._increments = [(link.folder, _entry(name, link)) for link in links]
        self._shard = shard
        for (folder, entry), (base, older) in zip(self._increments, self._increments[1:], strict=False):
            if entry.since != older.version or entry.schema != older.schema:
                raise CheckpointError(
                    f"table {name!r} in {folder} does not go on from that in {base}",
                    got=f"changes since version {entry.since} of {entry.schema}",
                    expected=f"changes since version {older.version} of {older.schema}",
                )

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._newest.schema

    @property
    def version(self) -> int:
        return self._newest.version

    @property
    def since(self) -> int | None:
        """None: the chain ends in a step that holds all rows."""
        return self._increments[-1][1].since

    @property
    def shard(self) -> RowShard:
        """The share that was asked for; rows of others may be among the chunks."""
        return self._shard

    @property
    def state(self) -> dict[str, Tensor]:
        folder, entry = self._increments[0]
        if not entry.state:
            return {}
        file = TensorFile(folder / entry.state, CheckpointError)
        return {name: file.tensor(name) for name in file.names()}

    @property
    def parts(self) -> tuple[str, ...]:
        """Those that have rows, and `ROWS`."""
        past = [rows.part for _, entry in self._increments for rows in entry.rows if is_row_data(rows.part)]
        return tuple(dict.fromkeys([ROWS, *past, *(rows.part for rows in self._newest.rows if rows.part != REMOVED)]))

    def chunks(self, part: str = ROWS) -> Iterator[Chunk]:
        """The rows of that part, each as its newest step has it; their memory is the files' where all of a file counts.

        Left out are files of no id of the share.
        """
        newer: list[Tensor] = []
        for files, removed in self.layers(part):
            known = torch.unique(torch.cat(newer)) if newer else None
            for ids, rows in files:
                yield (ids, rows) if known is None else _without(known, ids, rows)
                newer.append(ids)
            newer += removed

    def layers(self, part: str = ROWS) -> Iterator[tuple[list[Chunk], list[Tensor]]]:
        """Step by step, the newest first: the files of that part, mapped, and the ids that went away in it."""
        for folder, entry in self._increments if is_row_data(part) else self._increments[:1]:
            removed = [ids for ids, _ in self._read(folder, entry, REMOVED)]
            yield list(self._read(folder, entry, part)), removed

    def removed(self) -> Iterator[Tensor]:
        """Always empty: a chain has only current rows."""
        return iter(())

    def close(self) -> None:
        """See `RowSource`."""

    @property
    def _newest(self) -> TableEntry:
        return self._increments[0][1]

    def _read(self, folder: Path, entry: TableEntry, part: str) -> Iterator[Chunk]:
        index, count = self._shard
        for rows in entry.rows:
            is_others = rows.shard[1] == count and rows.shard[0] != index
            if rows.part != part or is_others:
                continue
            file = TensorFile(folder / rows.file, CheckpointError)
            chunk = file.tensor("ids"), file.tensor("rows")
            if len(chunk[0]) != rows.num_rows or len(chunk[1]) != rows.num_rows:
                raise CheckpointError(
                    f"{folder / rows.file} is not what the manifest says", expected=f"{rows.num_rows:,} rows"
                )
            yield chunk


def tables_of(modules: Iterable[nn.Module | SparseModule]) -> dict[str, RowTable]:
    """The tables among the modules, by name. Raises CheckpointError for rows that no checkpoint could keep, and for two
    tables of one name."""
    found: dict[str, RowTable] = {}
    for module in modules:
        if not isinstance(module, RowTable):
            if isinstance(module, SparseModule):
                raise CheckpointError(
                    f"a {type(module).__name__} has rows that a checkpoint cannot keep",
                    expected="the methods of core.optim.rows.RowTable",
                )
            continue
        name = str(module.schema["name"])
        if name in found:
            raise CheckpointError(f"two tables are called {name!r}", expected="distinct names")
        found[name] = module
    return found


def load_tables(tables: Mapping[str, RowTable], links: Sequence[Increment]) -> None:
    """Load every table from a chain of steps, newest first.

    Raises CheckpointError before any row is touched when the tables are not those that were saved.
    """
    stored = [entry.name for entry in links[0].manifest.tables]
    if set(stored) != set(tables):
        raise CheckpointError(
            f"{links[0].folder} holds other tables than the model has",
            got=", ".join(sorted(stored)) or "none",
            expected=", ".join(sorted(tables)) or "none",
            fix="open a checkpoint of this very model",
        )
    sources = {name: StoredTable(name, links, table.shard) for name, table in tables.items()}
    for name, table in tables.items():
        what, known = f"table {name!r} in {links[0].folder}", sources[name].schema
        # As JSON gives them back.
        now = plain(table.schema, what)
        different = [key for key in sorted({*known, *now}) if known.get(key) != now.get(key)]
        if different:
            raise CheckpointError(
                f"{what} is another table than the model's",
                got="; ".join(f"{key}: {known.get(key)}" for key in different),
                expected="; ".join(f"{key}: {now.get(key)}" for key in different),
                fix="open a checkpoint of this very model, or put the table's options back",
            )
    for name, table in tables.items():
        table.load_rows(sources[name])


def _entry(name: str, link: Increment) -> TableEntry:
    for entry in link.manifest.tables:
        if entry.name == name:
            return entry
    known = ", ".join(entry.name for entry in link.manifest.tables)
    raise CheckpointError(f"{link.folder} holds no table {name!r}", got=known or "no tables")


def _without(known: Tensor, ids: Tensor, rows: Tensor) -> Chunk:
    """The rows whose ids are not among the `known`, which ascend."""
    if not len(known):
        return ids, rows
    positions = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
    is_left = known[positions] != ids
    return (ids, rows) if bool(is_left.all()) else (ids[is_left], rows[is_left])
