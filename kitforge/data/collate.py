"""Columns that a batch needs not."""

from torch import Tensor


def drop_trivial_columns(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without `documents` when no row holds more than one, so that plain causal attention serves it."""
    documents = batch.get("documents")
    if documents is None or bool((documents == 0).all()):
        return {name: tensor for name, tensor in batch.items() if name != "documents"}
    return batch
