"""The record with which a row begins: its initial embedding and the optimizer's first state."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from kitforge.core.optim.sparse import RowLayout, RowOptimizer
from kitforge.core.parallel.sharded_table import TableConfig, initial_rows

# Rows made at a time, so that the numbers on the way to them stay in the processor's cache.
PORTION = 2048


@final
class InitialRecords:
    """A pure function of seed, table and id: no order, tier or rank can change it."""

    def __init__(self, config: TableConfig, optimizer: RowOptimizer, columns: slice | None = None) -> None:
        """`columns`: those of the table's that are here; all of them where it is None."""
        self._config = config
        self._optimizer = optimizer
        self._columns = columns or slice(0, config.dim)
        self.dim = len(range(*self._columns.indices(config.dim)))
        self.layout: RowLayout = optimizer.layout(self.dim)

    @torch.no_grad()
    def fill(self, keys: Tensor, out: Tensor) -> None:
        """Write the records of `keys` [n] to `out` [n, width]."""
        for start in range(0, len(keys), PORTION):
            part = slice(start, start + PORTION)
            out[part, : self.dim] = initial_rows(self._config, keys[part])[:, self._columns]
        self._optimizer.initialise_states_(out, self.layout)
