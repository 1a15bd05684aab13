"""Records of rows in memory, as a table makes them."""

import torch
from torch import Tensor

from kitforge.core.optim.row_optimizers import RowOptimizer


def new_records(rule: RowOptimizer, rows: Tensor) -> Tensor:
    """New records [n, width] around initial rows [n, dim]."""
    layout = rule.layout(rows.shape[1])
    records = torch.zeros(len(rows), layout.width, dtype=rows.dtype, device=rows.device)
    records[:, : layout.dim] = rows
    rule.init_states_(records, layout)
    return records
