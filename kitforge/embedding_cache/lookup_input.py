"""What a call of a table asks for: flat ids, and how their rows are put together. The face of `nn.EmbeddingBag`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.jagged_bags import Bags
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.foundation.errors import DataError


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookupInput:
    """Ids [N] and their bags; without bags every id stands alone."""

    ids: Tensor  # [N] int64, on the CPU
    bags: Bags | None
    weights: Tensor | None  # [N] those of the bags, as they came, for their gradient
    output_shape: tuple[int, ...]  # of the answer, without its last dim


def parse_lookup_input(
    options: CachedEmbeddingOptions, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> LookupInput:
    """What `CachedEmbedding.forward` was called with. Raises DataError for what cannot be asked."""
    flat = flat_ids(ids)
    if options.mode is None:
        if offsets is not None or weights is not None:
            raise DataError("a table of mode None has no bags", got="offsets or weights", expected="ids alone")
        return LookupInput(ids=flat, bags=None, weights=None, output_shape=tuple(ids.shape))
    if weights is None and offsets is None and ids.dim() == 2 and ids.shape[1] == 1:
        # Bags of one id each are nothing to put together.
        return LookupInput(ids=flat, bags=None, weights=None, output_shape=(len(ids),))
    offsets = _offsets(options, ids, offsets)
    if weights is not None:
        if weights.shape != ids.shape:
            raise DataError("ids and weights differ in shape", got=list(weights.shape), expected=list(ids.shape))
        weights = weights.reshape(-1)
    bags = Bags(offsets=offsets, mode=options.mode, weights=None if weights is None else weights.detach())
    bags.require(len(flat))
    return LookupInput(ids=flat, bags=bags, weights=weights, output_shape=(bags.num_bags,))


def flat_ids(ids: Tensor) -> Tensor:
    """Ids of any shape as [N] int64 on the CPU, where planning happens. Raises DataError for others than integers."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DataError(
            "these cannot be ids",
            got=str(ids.dtype).removeprefix("torch."),
            expected="int64",
            fix="where a batch holds more than ids, say which they are: prefetch(batches, ids=lambda batch: batch[0])",
        )
    return ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()


def check_range(ids: Tensor, num_embeddings: int | None, table: str) -> None:
    """Raise DataError for an id [u] that the table cannot have."""
    if num_embeddings is None or not len(ids):
        return
    lowest, highest = (int(bound) for bound in torch.aminmax(ids))
    if lowest < 0 or highest >= num_embeddings:
        raise DataError(
            f"an id is not in the table {table!r}",
            got=lowest if lowest < 0 else highest,
            expected=f"0 to {num_embeddings - 1}",
            fix="give the table a larger num_embeddings, or None to take any id",
        )


def _offsets(options: CachedEmbeddingOptions, ids: Tensor, offsets: Tensor | None) -> Tensor:
    if ids.dim() == 2:
        if offsets is not None:
            raise DataError("ids of two dims are bags already", got="offsets", expected="no offsets, or flat ids")
        return torch.arange(len(ids) + 1) * ids.shape[1]
    if ids.dim() != 1 or offsets is None:
        expected = "ids [num_bags, n], or flat ids [N] with offsets"
        raise DataError("it is not clear what the bags are", got=f"ids {list(ids.shape)}", expected=expected)
    offsets = offsets.detach().to("cpu", torch.int64)
    return offsets if options.include_last_offset else torch.cat([offsets, torch.tensor([len(ids)])])
