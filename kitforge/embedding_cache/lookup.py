"""One lookup: parses the arguments of `forward` as `nn.EmbeddingBag` does, pools rows, and collects their gradients.

Legend: N ids, u distinct rows among them, B bags.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.derivatives import by_hand
from kitforge.core.kernels.dispatch import select_table
from kitforge.core.kernels.tables.bags import Bags
from kitforge.core.kernels.tables.workspace import Workspace
from kitforge.core.optim.grad_norm import global_norm
from kitforge.embedding_cache.options import CachedEmbeddingOptions
from kitforge.embedding_cache.pins import LookupHandle, PinRegistry
from kitforge.embedding_cache.tiers.device import DeviceTier
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError, ModelError

# Ids whose rows are gathered at once for the gradient of weights.
CHUNK_IDS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LookupInput:
    """Ids [N] and their bags; without bags every id gives a row."""

    ids: Tensor  # [N] int64, where they were given
    bags: Bags | None
    weights: Tensor | None  # [N] the weights as passed in, for their gradient
    output_shape: tuple[int, ...]  # of the output, without its last dim


def parse_lookup_input(
    options: CachedEmbeddingOptions, ids: Tensor, offsets: Tensor | None, weights: Tensor | None
) -> LookupInput:
    """The arguments of `CachedEmbedding.forward`. Raises DataError for invalid ones."""
    flat = flat_ids(ids)
    if options.mode is None:
        if offsets is not None or weights is not None:
            raise DataError("a table of mode None has no bags", got="offsets or weights", expected="ids alone")
        return LookupInput(ids=flat, bags=None, weights=None, output_shape=tuple(ids.shape))
    if weights is None and offsets is None and ids.dim() == 2 and ids.shape[1] == 1:
        # Bags of one id each need no pooling.
        return LookupInput(ids=flat, bags=None, weights=None, output_shape=(len(ids),))
    if ids.dim() == 2:
        if offsets is not None:
            raise DataError("ids of two dims are bags already", got="offsets", expected="no offsets, or flat ids")
        offsets = torch.arange(len(ids) + 1) * ids.shape[1]
    elif ids.dim() == 1 and offsets is not None:
        offsets = offsets.detach().to("cpu", torch.int64)
        if not options.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([len(ids)])])
    else:
        expected = "ids [num_bags, n], or flat ids [N] with offsets"
        raise DataError("the bags of a lookup are undefined", got=f"ids {list(ids.shape)}", expected=expected)
    if weights is not None:
        if weights.shape != ids.shape:
            raise DataError("ids and weights differ in shape", got=list(weights.shape), expected=list(ids.shape))
        weights = weights.reshape(-1)
    bags = Bags(offsets=offsets, mode=options.mode, weights=None if weights is None else weights.detach())
    bags.require(len(flat))
    return LookupInput(ids=flat, bags=bags, weights=weights, output_shape=(bags.num_bags,))


def flat_ids(ids: Tensor) -> Tensor:
    """Ids of any shape as [N] int64 on their device. Raises DataError unless they are integers."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise DataError(
            "invalid dtype of ids",
            got=str(ids.dtype).removeprefix("torch."),
            expected="int64",
            fix="where a batch holds more than ids, say which they are: prefetch(batches, ids=lambda batch: batch[0])",
        )
    return ids.detach().reshape(-1).to(torch.int64).contiguous()


def check_range(ids: Tensor, num_embeddings: int | None, table: str) -> None:
    """Raise DataError for an id [u] outside the table."""
    if num_embeddings is None or not len(ids):
        return
    # In one thread: torch's others would go on spinning.
    values = ids.cpu().numpy()
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= num_embeddings:
        raise DataError(
            f"an id is not in the table {table!r}",
            got=lowest if lowest < 0 else highest,
            expected=f"0 to {num_embeddings - 1}",
            fix="give the table a larger num_embeddings, or None to take any id",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pooling:
    """How the rows of a source are pooled, and how gradients are scattered back to them."""

    tier: DeviceTier
    dim: int
    slots: Tensor  # [u] positions of the distinct rows in the source, on the device of the tier
    inverse: Tensor  # [N], on the device of the tier
    bags: Bags | None  # on the CPU
    device_bags: Bags | None  # the same on the device of the tier

    def pool(self, source: Tensor) -> Tensor:
        """[B, dim], or [N, dim] without bags, of the first `dim` columns of `source`."""
        kernel = self.tier.kernels.embedding_bag
        return kernel(source, self.slots, self.dim, inverse=self.inverse, bags=self.device_bags)

    def scatter_gradients(self, gradients: Tensor, out: Tensor) -> Tensor:
        """The gradients [u, dim] of the distinct rows, from those of the output of `pool`."""
        return self.tier.kernels.embedding_bag_backward(
            gradients.contiguous(), self.inverse, len(self.slots), bags=self.device_bags, out=out
        )

    def weight_gradients(self, source: Tensor, gradients: Tensor) -> Tensor:
        """[N] of the weights of the bags."""
        assert self.bags is not None
        device, counts = self.tier.device, self.bags.offsets.diff()
        bag_of = torch.repeat_interleave(torch.arange(len(counts)), counts)
        rows = source.index_select(0, self.slots)[:, : self.dim]
        chunks = zip(torch.split(self.inverse, CHUNK_IDS), torch.split(bag_of, CHUNK_IDS), strict=True)
        parts = [(rows[at] * gradients[copy_to(bags, device)]).sum(1) for at, bags in chunks]
        result = torch.cat([*parts, gradients.new_empty(0)])
        return result / copy_to(counts[bag_of], device).to(result.dtype) if self.bags.mode == "mean" else result


_by_hand = by_hand(fix="look the rows up without weights", where=lambda ctx: ctx.wants_weights)


class PooledRows(torch.autograd.Function):
    """Pools rows of the device tier as they are now; their gradients go to a `GradientHandle`. `anchor` requires a
    gradient, so that autograd calls the backward pass."""

    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, weights: Tensor | None, pooling: Pooling, handle: GradientHandle) -> Tensor:
        """See `Pooling.pool`; `weights` [N] are those of the bags."""
        ctx.pooling, ctx.handle = pooling, handle
        ctx.wants_weights = weights is not None and weights.requires_grad
        with pooling.tier.slab_lock:
            return pooling.pool(pooling.tier.slab)

    @staticmethod
    @_by_hand
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None, None]:
        """See `Pooling.scatter_gradients`."""
        pooling: Pooling = ctx.pooling
        weight_gradients = None
        if ctx.wants_weights:
            with pooling.tier.slab_lock:
                weight_gradients = pooling.weight_gradients(pooling.tier.slab, grad)
        ctx.handle(pooling.scatter_gradients(grad, ctx.handle.buffer()))
        return None, weight_gradients, None, None


class PooledVectors(torch.autograd.Function):
    """Pools vectors [u, dim] that came from other ranks; gradients go back to them."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weights: Tensor | None, pooling: Pooling) -> Tensor:
        """See `Pooling.pool`; `weights` [N] are those of the bags."""
        ctx.save_for_backward(vectors)
        ctx.pooling = pooling
        ctx.wants_weights = weights is not None and weights.requires_grad
        return pooling.pool(vectors)

    @staticmethod
    @_by_hand
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """See `Pooling.scatter_gradients`."""
        (vectors,) = ctx.saved_tensors
        pooling: Pooling = ctx.pooling
        weight_gradients = pooling.weight_gradients(vectors, grad) if ctx.wants_weights else None
        return pooling.scatter_gradients(grad, torch.empty_like(vectors)), weight_gradients, None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlotGradients:
    """Gradients [n, dim] of the rows at distinct slots [n] of the device tier."""

    slots: Tensor  # where lookups are planned
    device_slots: Tensor  # the same on the device of the tier
    gradients: Tensor


class RowGradients:
    """Gradients by slot, summed over the lookups of a step in the order of their backward passes."""

    def __init__(self, tier: DeviceTier, dim: int) -> None:
        self._tier, self._dim = tier, dim
        self._scratch = Workspace()
        self.clear()

    def clear(self) -> None:
        """Drop all gradients."""
        self.parts: list[SlotGradients] = []
        # The lookups whose gradients are here: their rows must stay.
        self.handles: list[LookupHandle] = []
        # True once the gradients of all ranks are summed, where all ranks hold all rows.
        self.is_reduced = False

    def buffer(self, name: str, num_rows: int) -> Tensor:
        """Uninitialized memory [num_rows, dim] of that name, reused from step to step."""
        if self._tier.device.type == "cpu":
            return self._scratch.take(name, num_rows, self._dim)
        return torch.empty(num_rows, self._dim, device=self._tier.device)

    def merged(self) -> SlotGradients | None:
        """All gradients, each row once; None when there are none. The caller may overwrite them."""
        if len(self.parts) > 1:
            tier, parts = self._tier, self.parts
            # Slots are in main memory unless lookups are planned where the rows are.
            given = torch.cat([part.slots for part in parts])
            slots, inverse = (select_table() if given.is_cpu else tier.kernels).unique(given)
            gradients = torch.cat(
                [part.gradients for part in parts], out=self.buffer("joined", sum(len(part.slots) for part in parts))
            )
            summed = tier.kernels.embedding_bag_backward(
                gradients, copy_to(inverse, tier.device), len(slots), out=self.buffer("summed", len(slots))
            )
            self.parts = [SlotGradients(slots=slots, device_slots=copy_to(slots, tier.device), gradients=summed)]
        return self.parts[0] if self.parts else None

    def squared_norm(self) -> Tensor:
        """The sum of squares over all rows, 0-dim float64."""
        part = self.merged()
        return torch.zeros((), dtype=torch.float64) if part is None else global_norm([part.gradients]).double() ** 2


class GradientHandle:
    """Receives the gradients of one lookup. When it dies without any, the lookup is closed."""

    def __init__(self, lookup: LookupHandle, gradients: RowGradients, tier: DeviceTier, pins: PinRegistry) -> None:
        self._lookup, self._gradients, self._tier = lookup, gradients, tier
        # Calling it closes the lookup: there will be no gradients.
        self.close = weakref.finalize(self, pins.close, lookup.number)
        self.close.atexit = False

    def buffer(self) -> Tensor:
        """Memory for the gradients [u, dim]; no gradient of another lookup lies there."""
        return self._gradients.buffer(f"part {len(self._gradients.handles)}", len(self._lookup.slots))

    def __call__(self, gradients: Tensor) -> None:
        """Keep the gradients [u, dim] of rows that train until the step. Raises ModelError after that step."""
        lookup = self._lookup
        if not lookup.is_open:
            raise ModelError(
                "a backward pass came after the step of its lookup",
                fix="call backward once for each lookup, before step or clear_gradients",
            )
        self.close.detach()
        part = SlotGradients(slots=lookup.slots, device_slots=lookup.device_slots, gradients=gradients)
        if lookup.is_trained is not None:
            there = lookup.is_trained.to(self._tier.device)
            part = SlotGradients(
                slots=part.slots[lookup.is_trained], device_slots=part.device_slots[there], gradients=gradients[there]
            )
        self._gradients.handles.append(lookup)
        self._gradients.parts.append(part)
