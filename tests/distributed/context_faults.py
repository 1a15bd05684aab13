"""Faults of the context axis, planted for as long as a `with` lasts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kitforge.core.nn.context import CausalAttend, Context, DropoutShard
from kitforge.core.parallel import context
from kitforge.core.parallel.parallelize import ParallelModel


def _shard_of(**changes: Any) -> Any:
    """Contexts of shards of rows in which a function of the shard's context has changed some fields."""
    original = context.ContextParallelModel.local_shard

    def changed(self: Any, tokens: Tensor, whole: Context, depends_on_length: bool) -> tuple[Tensor, Context]:
        own, found = original(self, tokens, whole, depends_on_length)
        return own, dataclasses.replace(found, **{name: change(found) for name, change in changes.items()})

    return mock.patch.object(context.ContextParallelModel, "local_shard", changed)


def _leaking_documents() -> Any:
    def attend(found: Context) -> Any:
        exchange: Any = found.attend
        return context.HeadExchange(CausalAttend(), exchange._group, exchange._length)

    return _shard_of(attend=attend)


def _positions_from_the_cut() -> Any:
    return _shard_of(positions=lambda found: torch.arange(found.positions.shape[-1]))


def _same_noise_on_shards() -> Any:
    def key(found: Context) -> Any:
        assert found.dropout is not None
        (_, parts), (_, heads) = found.dropout.shard.sequence, found.dropout.shard.heads
        return dataclasses.replace(found.dropout, shard=DropoutShard(sequence=(0, parts), heads=(0, heads)))

    return _shard_of(dropout=key)


def _balanced_by_shard() -> Any:
    return _shard_of(shard=lambda found: dataclasses.replace(found.shard, sum=lambda values: values))


def _targets_lost_at_the_cut() -> Any:
    original = context.ContextParallelModel._own_tokens

    def own(self: Any, count: int) -> slice:
        found = original(self, count)
        return slice(found.start + 2, found.stop)

    return mock.patch.object(context.ContextParallelModel, "_own_tokens", own)


def _slopes_of_the_first_heads() -> Any:
    def own_heads(self: Any, spec: Any) -> Any:
        return spec if spec.slopes is None else dataclasses.replace(spec, slopes=spec.slopes.chunk(self._ranks)[0])

    return mock.patch.object(context.HeadExchange, "_own_heads", own_heads)


def _whole_loss_on_each() -> Any:
    return mock.patch.object(ParallelModel, "loss_fraction", 1.0)


def _gather_that_slices_back() -> Any:
    return mock.patch.object(context.collectives, "all_gather_autograd", context.collectives.all_gather_replicated)


# Faults of the context axis, each with a family that shows it.
CONTEXT_FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "documents that leak over a cut": ("gpt2", _leaking_documents),
    "positions that begin at the cut": ("llama", _positions_from_the_cut),
    "targets that are lost at the cut": ("gpt2", _targets_lost_at_the_cut),
    "dropout that shards repeat": ("gpt2", _same_noise_on_shards),
    "a loss that every rank counts": ("gpt2", _whole_loss_on_each),
    "a gather that slices in the backward pass": ("gpt2", _gather_that_slices_back),
    "slopes of the first heads on every rank": ("bloom", _slopes_of_the_first_heads),
    "a balance of each shard by itself": ("mixtral", _balanced_by_shard),
}
