"""Splitting of batches into micro-batches, and removal of padding."""

from __future__ import annotations

from torch import Tensor

from kitforge.foundation.config import check


def split_micro_batches(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Views of at most `size` rows each, in order; the last may be smaller."""
    check(size >= 1, "trainer.micro_batch_size", size, "a positive number")
    num_rows = {len(tensor) for tensor in batch.values()}
    if len(num_rows) > 1:
        raise ValueError(f"the tensors of a batch differ in rows: {sorted(num_rows)}")
    return [
        {name: tensor[start : start + size] for name, tensor in batch.items()}
        for start in range(0, max(num_rows, default=0), size)
    ]


def drop_trivial_columns(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without `documents` when no row holds more than one, so that plain causal attention serves it."""
    documents = batch.get("documents")
    if documents is None or bool((documents == 0).all()):
        return {name: tensor for name, tensor in batch.items() if name != "documents"}
    return batch
