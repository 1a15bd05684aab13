"""Indices of the rows in memory-mapped files. Rows are read on access.

Legend: m ids or positions of a call, n rows in all files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kitforge.core.kernels.hash_map.reference import HashMapFactory
from kitforge.core.optim.table_protocols import Chunk

# The position of an id whose row was removed: behind all rows.
REMOVED = 2**62


class RowShards:
    """Tensors [.., width] concatenated to [n, width] without a copy."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self.parts = list(parts)
        self._ends = torch.tensor([len(part) for part in parts], dtype=torch.int64).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if self.parts else 0

    def gather(self, positions: Tensor) -> Tensor:
        """Copies [m, width] of the rows at positions [m]. There is at least one part."""
        if len(self.parts) == 1:
            return self.parts[0].index_select(0, positions)
        part_of = torch.searchsorted(self._ends, positions, right=True)
        rows = self.parts[0].new_empty(len(positions), self.parts[0].shape[1])
        for number in torch.unique(part_of).tolist():
            is_here = part_of == number
            part = self.parts[number]
            rows[is_here] = part.index_select(0, positions[is_here] - (int(self._ends[number]) - len(part)))
        return rows


class HashedRowIndex:
    """An index in memory over files of unsorted ids. A newer file hides the rows of older ones."""

    def __init__(
        self,
        new_hash_map: HashMapFactory,
        layers: Iterable[tuple[Sequence[Chunk], Sequence[Tensor]]],
        older: HashedRowIndex | None = None,
    ) -> None:
        """`layers`: files of ids and rows, and removed ids, newest first; see `StoredTable.layers`. They build on
        `older`, which does not change: its index of the full checkpoint is shared, later entries are copied."""
        parts: list[Tensor] = [] if older is None else list(older.rows.parts)
        self._positions = new_hash_map()
        # The index of the full checkpoint below.
        self._whole: HashedRowIndex | None = None if older is None else older._whole or older
        start = 0 if older is None else len(older.rows)
        for files, removed in layers:
            for ids, rows in files:
                self._add(ids, torch.arange(start, start + len(ids)))
                parts.append(rows)
                start += len(ids)
            for ids in removed:
                self._add(ids, torch.full((len(ids),), REMOVED))
        if older is not None and older._whole is not None:
            self._add(*older._positions.items())
        self.rows: RowShards = RowShards(parts)

    def find(self, ids: Tensor) -> Tensor:
        """The positions [m] of ids [m]; -1 for an unknown id."""
        positions = self._positions.lookup(ids)
        if self._whole is not None:
            unknown = (positions < 0).nonzero().squeeze(1)
            positions[unknown] = self._whole._positions.lookup(ids[unknown].contiguous())
        return torch.where(positions == REMOVED, -1, positions)

    def ids(self) -> tuple[Tensor, Tensor]:
        """All ids, ascending, and their positions."""
        ids, positions = self._positions.items()
        if self._whole is not None:
            known, (older, older_at) = torch.unique(ids), self._whole._positions.items()
            left = ~torch.isin(older, known)
            order = torch.cat([ids, older[left]]).argsort()
            ids, positions = (torch.cat(pair)[order] for pair in ((ids, older[left]), (positions, older_at[left])))
        is_there = positions != REMOVED
        return ids[is_there], positions[is_there]

    def _add(self, ids: Tensor, positions: Tensor) -> None:
        is_new = self._positions.lookup(ids) < 0
        self._positions.insert(ids[is_new].contiguous(), positions[is_new])


class SortedRowIndex:
    """An index without memory of its own: ids ascend within and across the files."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        self._parts = list(parts)
        self._firsts = torch.tensor([int(part[0]) for part in parts], dtype=torch.int64)
        self._starts = [0, *torch.tensor([len(part) for part in parts]).cumsum(0).tolist()]

    def find(self, ids: Tensor) -> Tensor:
        """The positions [m] of ids [m]; -1 for an unknown id."""
        positions = torch.full((len(ids),), -1)
        part_of = torch.searchsorted(self._firsts, ids, right=True) - 1
        for number in torch.unique(part_of[part_of >= 0]).tolist():
            part, asked = self._parts[number], (part_of == number).nonzero().squeeze(1)
            near = torch.searchsorted(part, ids[asked]).clamp_(max=len(part) - 1)
            is_there = part.index_select(0, near) == ids[asked]
            positions[asked[is_there]] = near[is_there] + self._starts[number]
        return positions

    def ids(self) -> tuple[Tensor, Tensor]:
        """All ids, ascending, and their positions."""
        ids = torch.cat([*self._parts, torch.empty(0, dtype=torch.int64)])
        return ids, torch.arange(len(ids))
