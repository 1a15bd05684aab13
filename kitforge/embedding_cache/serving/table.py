"""A read-only table with the interface of `CachedEmbedding`, over the files of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.table_reader import StoredTable
from kitforge.core.kernels.dispatch import select_table
from kitforge.core.optim.row_optimizers import RowOptimizer, SparseOptimizerConfig, build_row_optimizer
from kitforge.core.optim.table_protocols import ROWS, is_row_data
from kitforge.embedding_cache.keys.row_init import RowInitConfig, initial_rows
from kitforge.embedding_cache.lookup import check_range, parse_lookup_input
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.serving.mmap_rows import HashedRowIndex, RowShards, SortedRowIndex
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import CheckpointError

# The field of a quantized table's schema that says how its rows are stored.
SERVED = "serving"
SCALES = "scales"
ServingDtype = Literal["fp32", "fp16", "int8"]
COLUMN_PART = re.compile(rf"{ROWS}-(\d+)-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnShard:
    """Some columns of all rows."""

    columns: slice
    index: HashedRowIndex | SortedRowIndex
    rows: RowShards
    scales: RowShards | None = None  # int8: the scale of each row


class ServedTable(nn.Module):
    """Looks rows up in the files of a checkpoint, or in those written by `quantize_tables`.

    Rows of a checkpoint are those that training would look up after that step, bit for bit; an id without a row has its
    initial row. Rows are memory-mapped. A checkpoint needs an index of its ids in memory, two numbers each; quantized
    files need none.
    """

    def __init__(
        self,
        stored: StoredTable,
        *,
        mode: Literal["sum", "mean"] | None = "sum",
        include_last_offset: bool = True,
        older: ServedTable | None = None,
    ) -> None:
        """`older`: the table of the step that `stored` builds on, where `stored` holds changes only; it stays as
        it is. Raises CheckpointError where they do not fit."""
        super().__init__()
        if stored.since is not None and (older is None or stored.since != older._version):
            raise CheckpointError(
                f"the rows of table {stored.name!r} do not build on those that are served",
                got=f"changes since version {stored.since}",
                expected="all rows" if older is None else f"changes since version {older._version}",
            )
        schema = stored.schema
        self.dtype = cast(ServingDtype | None, schema.get(SERVED, {}).get("dtype"))
        fields = ("name", "dim", "seed", "initial", "init_scale")
        self.config = RowInitConfig(**{field: schema[field] for field in fields})
        # The width of the output of `forward`.
        self.embedding_dim = self.config.dim
        self.options = CachedEmbeddingOptions(
            num_embeddings=schema.get("num_embeddings"),
            dim=self.config.dim,
            name=self.config.name,
            mode=mode,
            include_last_offset=include_last_offset,
        )
        self._kernels = select_table()
        self._optimizer = build_row_optimizer(from_dict(SparseOptimizerConfig, schema["optimizer"]), self._kernels)
        self._version, self._state = stored.version, stored.state
        known: dict[str, ColumnShard] = {} if older is None or stored.since is None else older._parts
        names = dict.fromkeys([*known, *filter(is_row_data, stored.parts)])
        parts = {part: self._column_shard(stored, part, known.get(part)) for part in names}
        self._parts: dict[str, ColumnShard] = {part: shard for part, shard in parts.items() if len(shard.rows)}
        self._column_shards = list(self._parts.values())

    @torch.no_grad()
    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """See `CachedEmbedding.forward`. Nothing has a gradient."""
        query = parse_lookup_input(self.options, ids, offsets, weights)
        distinct, inverse = self._kernels.unique(query.ids.cpu())
        check_range(distinct, self.options.num_embeddings, self.options.name)
        vectors, positions = self.vectors(distinct), torch.arange(len(distinct))
        output = self._kernels.embedding_bag(vectors, positions, self.options.dim, inverse=inverse, bags=query.bags)
        return output.reshape(*query.output_shape, self.options.dim)

    @torch.no_grad()
    def vectors(self, ids: Tensor) -> Tensor:
        """The rows [m, dim] float32 of ids [m]."""
        vectors = torch.empty(len(ids), self.config.dim)
        is_missing = torch.ones(len(ids), dtype=torch.bool)
        for shard in self._column_shards:
            positions = shard.index.find(ids)
            is_there = positions >= 0
            vectors[is_there, shard.columns] = self._read(shard, positions[is_there])
            is_missing &= ~is_there
        if bool(is_missing.any()):
            vectors[is_missing] = initial_rows(self.config, ids[is_missing]).float()
        return vectors

    def has_rows(self, ids: Tensor) -> Tensor:
        """Which of the ids [m] have a row; the others are looked up as their initial rows."""
        found = torch.zeros(len(ids), dtype=torch.bool)
        for shard in self._column_shards:
            found |= shard.index.find(ids) >= 0
        return found

    def ids(self) -> Tensor:
        """All ids that have a row, in ascending order."""
        ids = [shard.index.ids()[0] for shard in self._column_shards]
        return ids[0] if ids else torch.empty(0, dtype=torch.int64)

    def extra_repr(self) -> str:
        """The options shown by `print`."""
        return f"{self.options.num_embeddings}, {self.options.dim}, mode={self.options.mode}, {self.dtype or 'records'}"

    def _column_shard(self, stored: StoredTable, part: str, older: ColumnShard | None) -> ColumnShard:
        match = COLUMN_PART.fullmatch(part)
        if part != ROWS and match is None:
            raise CheckpointError("rows of an unknown part", got=part, expected=f"{ROWS}, or {ROWS}-FROM-TO")
        columns = slice(0, self.config.dim) if match is None else slice(int(match[1]), int(match[2]))
        if self.dtype is None:
            before = older.index if older is not None else None
            assert before is None or isinstance(before, HashedRowIndex)
            index = HashedRowIndex(self._kernels.hash_map, stored.layers(part), before)
            return ColumnShard(columns=columns, index=index, rows=index.rows)
        files = list(stored.chunks(part))
        scales = RowShards([rows for _, rows in stored.chunks(SCALES)]) if self.dtype == "int8" else None
        return ColumnShard(
            columns=columns,
            index=SortedRowIndex([ids for ids, _ in files]),
            rows=RowShards([rows for _, rows in files]),
            scales=scales,
        )

    def _read(self, shard: ColumnShard, positions: Tensor) -> Tensor:
        rows = shard.rows.gather(positions)
        if shard.scales is not None:
            return rows.float() * shard.scales.gather(positions)
        if self.dtype is not None:
            return rows.float()
        _catch_up(self._optimizer, rows, self._version, self._state)
        return rows[:, : shard.columns.stop - shard.columns.start]


def _catch_up(optimizer: RowOptimizer, records: Tensor, version: int, state: Mapping[str, Tensor]) -> None:
    """Adam also moves rows without a gradient: apply the steps up to this version."""
    if optimizer.moves_untouched_rows:
        optimizer.catch_up(records, torch.arange(len(records)), version, state["rates"])
