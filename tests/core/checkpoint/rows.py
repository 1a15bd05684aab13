"""A table as plain as can be, that keeps its rows in a dict; and what tests ask of saved ones."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.optim.table_protocols import ROWS, Chunk, RowShard, RowSource, RowTable
from kitforge.core.parallel.table import owner
from kitforge.core.parallel.world import ALONE, World

EXTREME = (-(2**63), -1, 0, 2**63 - 1)
Rows = dict[int, tuple[float, ...]]


@final
@dataclass(kw_only=True)
class Held:
    """A snapshot: a copy of the rows."""

    schema: Mapping[str, Any]
    version: int
    since: int | None
    shard: RowShard
    state: dict[str, Tensor]
    held: dict[str, Rows]
    gone: list[int]
    chunk: int
    is_closed: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.held)

    def chunks(self, part: str = ROWS) -> Iterator[Chunk]:
        assert not self.is_closed
        rows = sorted(self.held[part].items())
        for start in range(0, len(rows), self.chunk):
            few = rows[start : start + self.chunk]
            yield torch.tensor([id for id, _ in few]), torch.tensor([row for _, row in few])

    def removed(self) -> Iterator[Tensor]:
        yield torch.tensor(self.gone, dtype=torch.int64)

    def close(self) -> None:
        self.is_closed = True


@final
@dataclass(kw_only=True)
class DictTable:
    """Rows [dim] by id, with counts of ids beside them as a part of its own."""

    name: str = "users"
    dim: int = 3
    shard: RowShard = (0, 1)
    chunk: int = 5
    version: int = 0
    rows: Rows = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    gone: dict[int, int] = field(default_factory=dict)
    counts: Rows = field(default_factory=dict)
    snapshots: list[Held] = field(default_factory=list)

    @property
    def schema(self) -> dict[str, Any]:
        return {"name": self.name, "dim": self.dim, "optimizer": {"name": "adagrad", "betas": (0.9, 0.999)}}

    def change(self, ids: Iterable[int], seed: int = 0) -> None:
        """One step: these rows become others. Of many ranks, each changes its own."""
        self.version += 1
        for id in ids:
            if self.owns(id):
                self.rows[id] = tuple(hash((id, seed, self.version, column)) % 97 / 8 for column in range(self.dim))
                self.changed[id] = self.version
                self.counts[id] = (float(self.version),)

    def remove(self, ids: Iterable[int]) -> None:
        """These rows go away."""
        for id in ids:
            if self.rows.pop(id, None) is not None:
                self.gone[id] = self.version

    def owns(self, id: int) -> bool:
        return int(owner(torch.tensor([id]), self.shard[1])) == self.shard[0]

    def begin_snapshot(self, since: int | None = None, *, is_base: bool = True) -> RowSource:
        rows = {id: row for id, row in self.rows.items() if since is None or self.changed[id] > since}
        held = Held(
            schema=self.schema,
            version=self.version,
            since=since,
            shard=self.shard,
            state={"rates": torch.arange(self.version, dtype=torch.float64)},
            held={ROWS: rows, "counts": dict(self.counts)},
            gone=list(self.gone),
            chunk=self.chunk,
        )
        self.gone.clear()
        self.snapshots.append(held)
        return held

    def load_rows(self, source: RowSource) -> None:
        self.version = source.version
        assert source.state["rates"].tolist() == list(range(source.version))
        self.rows = self._own(source.chunks())
        self.counts = self._own(source.chunks("counts")) if "counts" in source.parts else {}
        self.changed = dict.fromkeys(self.rows, source.version)
        self.gone = {}

    def _own(self, chunks: Iterable[Chunk]) -> Rows:
        found: Rows = {}
        for ids, rows in chunks:
            for id, row in zip(ids.tolist(), rows.tolist(), strict=True):
                if self.owns(id):
                    assert id not in found, f"id {id} came twice"
                    found[id] = tuple(row)
        return found


def save(writer: CheckpointWriter, step: int) -> None:
    """Save a step whose tensors do not matter."""
    writer.save(step, model=[("weight", torch.full((4,), float(step)))], optimizer=[], state={"step": step})


def loaded(root: Path, step: int, *tables: DictTable, world: World = ALONE) -> None:
    """Let new tables become those of a step."""
    named: dict[str, RowTable] = {table.name: table for table in tables}
    open_checkpoint(step_folder(root, step), world=world).load_tables(named)
