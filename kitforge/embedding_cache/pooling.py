"""Rows put together for a query, as functions of autograd: from the slab of a tier, or from vectors that came by post.

Legend: N ids, u distinct rows among them, B bags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kitforge.core.kernels.jagged_bags import Bags
from kitforge.embedding_cache.tiers.device import DeviceTier

# Ids whose rows are laid out at once for the gradient of weights.
CHUNK_IDS = 4096


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pooling:
    """How the rows of a source are put together, and what becomes of their gradients."""

    tier: DeviceTier
    dim: int
    slots: Tensor  # [u] places of the distinct rows in the source
    inverse: Tensor  # [N]
    bags: Bags | None

    def pool(self, source: Tensor) -> Tensor:
        """[B, dim], or [N, dim] without bags, of the first `dim` columns of `source`."""
        there = self.tier.to_device
        return self.tier.kernels.embedding_bag(
            source, there(self.slots), self.dim, inverse=there(self.inverse), bags=self._bags_there()
        )

    def scatter_gradients(self, gradients: Tensor, out: Tensor) -> Tensor:
        """The gradients [u, dim] of the distinct rows, from those of what `pool` gave."""
        return self.tier.kernels.embedding_bag_backward(
            gradients.contiguous(), self.tier.to_device(self.inverse), len(self.slots), bags=self._bags_there(), out=out
        )

    def weight_gradients(self, source: Tensor, gradients: Tensor) -> Tensor:
        """[N] of the weights of the bags."""
        assert self.bags is not None
        counts = self.bags.offsets.diff()
        bag_of = torch.repeat_interleave(torch.arange(len(counts)), counts)
        rows = source.index_select(0, self.tier.to_device(self.slots))[:, : self.dim]
        parts = [
            (rows[self.tier.to_device(positions)] * gradients[self.tier.to_device(bags)]).sum(1)
            for positions, bags in zip(
                torch.split(self.inverse, CHUNK_IDS), torch.split(bag_of, CHUNK_IDS), strict=True
            )
        ]
        result = torch.cat([*parts, gradients.new_empty(0)])
        is_mean = self.bags.mode == "mean"
        return result / self.tier.to_device(counts[bag_of]).to(result.dtype) if is_mean else result

    def _bags_there(self) -> Bags | None:
        if self.bags is None or self.tier.device.type == "cpu":
            return self.bags
        weights = None if self.bags.weights is None else self.tier.to_device(self.bags.weights)
        return replace(self.bags, offsets=self.tier.to_device(self.bags.offsets), weights=weights)


# What is done with the gradients [u, dim] of the rows of a lookup.
Deliver = Callable[[Tensor], None]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PooledLookup:
    """A pooling of rows of the device tier whose gradients are delivered, not returned."""

    pooling: Pooling
    buffer: Callable[[], Tensor]  # where the gradients [u, dim] go
    deliver: Deliver


def pooled_rows(lookup: PooledLookup, weights: Tensor | None) -> Tensor:
    """The answer from the slab of the device tier, as its values are now; `weights` [N] are those of the bags."""
    # Autograd calls the backward pass only of what depends on a tensor that asks for a gradient.
    anchor = torch.empty(0, requires_grad=True)
    output: Tensor = _PooledRows.apply(anchor, weights, lookup)  # type: ignore[no-untyped-call]
    return output


def pooled_vectors(vectors: Tensor, pooling: Pooling, weights: Tensor | None) -> Tensor:
    """The answer from vectors [u, dim], to which gradients go back; `weights` [N] are those of the bags."""
    output: Tensor = _PooledVectors.apply(vectors, weights, pooling)  # type: ignore[no-untyped-call]
    return output


class _PooledRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, weights: Tensor | None, lookup: PooledLookup) -> Tensor:
        ctx.lookup = lookup
        ctx.wants_weights = weights is not None and weights.requires_grad
        with lookup.pooling.tier.using() as slab:
            return lookup.pooling.pool(slab)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        lookup: PooledLookup = ctx.lookup
        weight_gradients = None
        if ctx.wants_weights:
            with lookup.pooling.tier.using() as slab:
                weight_gradients = lookup.pooling.weight_gradients(slab, grad)
        lookup.deliver(lookup.pooling.scatter_gradients(grad, lookup.buffer()))
        return None, weight_gradients, None


class _PooledVectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, vectors: Tensor, weights: Tensor | None, pooling: Pooling) -> Tensor:
        ctx.save_for_backward(vectors)
        ctx.pooling = pooling
        ctx.wants_weights = weights is not None and weights.requires_grad
        return pooling.pool(vectors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (vectors,) = ctx.saved_tensors
        pooling: Pooling = ctx.pooling
        weight_gradients = pooling.weight_gradients(vectors, grad) if ctx.wants_weights else None
        return pooling.scatter_gradients(grad, torch.empty_like(vectors)), weight_gradients, None
