"""Context parallelism: every rank has a shard of each row, and in attention whole rows of a part of the heads, or the
keys that its queries see (`key_gather`).

DeepSpeed-Ulysses (Jacobs et al., 2023): one all-to-all before attention turns shards of rows with all heads into whole
rows of some heads, one behind it turns them back. Attention itself is that of one process, so documents, windows,
slopes and dropout are as they are there. Rows are cut inside of `hidden` and joined at its end, so losses see whole
rows; the head's product, which is large, is computed by each rank for its part of the tokens.

Every rank of the axis computes the same loss, whose backward pass begins with its part of the gradient: one over the
degree. The gather at the end sums in the backward pass. So every gradient, inside of the cut and outside, is a part on
each rank, and the parts are summed over the axis with those of the replicas.
B batch, T length of rows.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.causal_lm import Shardable
from kitforge.core.nn.context import (
    AttentionSpec,
    CausalAttend,
    Context,
    DocumentAttend,
    DropoutShard,
    RowAttend,
    SequenceShard,
)
from kitforge.core.nn.rotary import document_lengths
from kitforge.core.nn.stack import Stack
from kitforge.core.parallel import collectives
from kitforge.core.parallel.config import CHUNKS
from kitforge.core.parallel.key_gather import KeyGather
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.row_cut import cut_rows
from kitforge.foundation.errors import ModelError
from kitforge.foundation.host_values import is_fake
from kitforge.foundation.log import logger
from kitforge.foundation.types import IGNORED

_log = logger(__name__)

# The document of the tokens that pad a row; those of a batch count from 0.
PADDING = -1
# Of a message that runs behind attention: at 50 GB/s it takes three times as long as it takes to start.
GROUP_BYTES = 4 * 2**20


class HeadExchange(RowAttend):
    """Attention of whole rows for shards of them: query [B, heads, T / ranks, head_dim] and the same of key and value
    become [B, heads / ranks, T, head_dim] for the attention `inner`, and its output becomes a shard again."""

    def __init__(self, inner: RowAttend, group: dist.ProcessGroup, length: int, *, drops: bool) -> None:
        """`length` is that of the rows without the padding that makes their shards equal; attention does not see it.
        With `drops` heads are in one group, since dropout of the weights counts them."""
        self.inner = inner
        self._group, self._drops = group, drops
        self._ranks, self._rank = collectives.group_size(group), collectives.group_rank(group)
        self._length = length

    def prepare(self, stream: Tensor, length: int, windows: Iterable[int | None], head_dim: int) -> None:
        """See `RowAttend`; the inner attention has whole rows."""
        del length
        self.inner.prepare(stream, self._length, windows, head_dim)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        ranks = self._ranks
        # Where there are fewer heads of keys than ranks, or a number that the ranks do not divide, they are repeated.
        repeats = math.lcm(key.shape[1], ranks) // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) if repeats > 1 else each for each in (key, value))
        num_bytes = query.nbytes + key.nbytes + value.nbytes
        groups = num_head_groups(query.shape[1] // ranks, key.shape[1] // ranks, num_bytes)
        if groups > 1 and not self._drops:
            # The compiler has no message that is awaited later.
            if torch.compiler.is_compiling():
                return torch.compiler.disable(self._by_groups)(groups, query, key, value, spec)  # type: ignore[no-untyped-call, no-any-return]
            return self._by_groups(groups, query, key, value, spec)
        # One message: of each rank's heads, those of the queries, the keys and the values.
        parts = [torch.unflatten(each, 1, (ranks, each.shape[1] // ranks)) for each in (query, key, value)]
        whole = collectives.exchange_autograd(torch.cat(parts, dim=2).flatten(1, 2), self._group, 1, 2)
        mixed = self._attended(_divided(whole, parts), self._own_heads(spec))
        return collectives.exchange_autograd(mixed, self._group, 2, 1)

    def _by_groups(self, groups: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attention of one group of a rank's heads after the other, while the message of the next one and the output of
        the last one are on their way. Groups that see the same keys receive them once."""
        if self._rank == 0:
            _say_groups(groups)
        # So many groups see the same keys.
        sharing = groups // math.gcd(groups, key.shape[1] // self._ranks)
        counts = (groups, groups // sharing, groups // sharing)
        queries, keys, values = (
            torch.unflatten(each, 1, (self._ranks, count, -1)).unbind(2)
            for each, count in zip((query, key, value), counts, strict=True)
        )

        def start(number: int) -> tuple[collectives.Exchange, Tensor, list[Tensor]]:
            parts, first = [queries[number]], number // sharing
            if number % sharing == 0:
                parts += [keys[first], values[first]]
            exchange = collectives.Exchange(self._group, 1, 2)
            return exchange, exchange.start(torch.cat(parts, dim=2).flatten(1, 2)), parts

        own_heads, seen = self._own_heads(spec), list[Tensor]()
        coming, leaving = [start(0)], list[tuple[collectives.Exchange, Tensor]]()
        for number in range(groups):
            exchange, started, parts = coming.pop()
            if number + 1 < groups:
                coming.append(start(number + 1))
            own = _divided(exchange.finish(started), parts)
            seen = own[1:] or seen
            slopes = None if own_heads.slopes is None else own_heads.slopes.chunk(groups)[number]
            mixed = self._attended([own[0], *seen], dataclasses.replace(own_heads, slopes=slopes))
            exchange = collectives.Exchange(self._group, 2, 1)
            leaving.append((exchange, exchange.start(mixed)))
            del started, own, mixed
        del seen
        outputs = [torch.unflatten(exchange.finish(started), 1, (self._ranks, -1)) for exchange, started in leaving]
        return torch.cat(outputs, dim=2).flatten(1, 2)

    def _attended(self, received: list[Tensor], spec: AttentionSpec) -> Tensor:
        """The attention output [B, heads, padded T, head_dim] of queries, keys and values of that length."""
        query, key, value = (each[:, :, : self._length] for each in received)
        mixed = self.inner(query, key, value, spec)
        missing = received[0].shape[2] - self._length
        return functional.pad(mixed, (0, 0, 0, missing)) if missing else mixed

    def _own_heads(self, spec: AttentionSpec) -> AttentionSpec:
        if spec.slopes is None:
            return spec
        return dataclasses.replace(spec, slopes=spec.slopes.chunk(self._ranks)[self._rank])


def num_head_groups(heads: int, kv_heads: int, num_bytes: int) -> int:
    """Into how many groups a rank's heads are divided, for messages of so many bytes in all: as many as leave each
    `GROUP_BYTES`, where a group has whole heads of keys or a part of the queries of one."""
    legal = (each for each in range(1, heads + 1) if heads % each == 0 and 0 in (kv_heads % each, each % kv_heads))
    return max(each for each in legal if each == 1 or each * GROUP_BYTES <= num_bytes)


@functools.cache
def _say_groups(groups: int) -> None:
    _log.info("parallel.context: attention runs by %d groups of heads, beside the messages of others", groups)


def _divided(heads: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """Heads [B, n, T, head_dim], in the numbers and dtypes of `parts` [B, ranks, heads, tokens, head_dim]."""
    sizes = [each.shape[2] for each in parts]
    return [own.to(each.dtype) for own, each in zip(torch.split(heads, sizes, 1), parts, strict=True)]


class _Pass(threading.local):
    """Of the last pass of this thread, where `hidden` is not joined: this rank's shard of targets."""

    cut_targets: Callable[[Tensor], Tensor] | None = None


class ContextParallelModel:
    """The language models of a network, whose rows are cut along the context axis."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        group = mesh.group("context")
        assert group is not None
        self._group: dist.ProcessGroup = group
        self._degrees = mesh.degrees
        self._ranks, self._rank = mesh.degree("context"), mesh.index["context"]
        self._is_said = self._rank > 0
        self._pass = _Pass()
        for module in model.modules():
            if isinstance(module, Stack) and isinstance(module, Shardable):
                module.cut = functools.partial(self.local_shard, module)
                module.gathers_keys = mesh.degrees.context_by == "keys"
                self._cut_tokens_of_head(module)

    def local_shard(self, stack: Any, tokens: Tensor, context: Context) -> tuple[Tensor, Context]:
        """This rank's shard of tokens [B, T] and of their context. Rows are padded to shards of equal length; the
        padding is at the end, where no token sees it, and is not counted."""
        self._pass.cut_targets = None
        # With a cache every rank has the whole network and computes its tokens alone.
        if not isinstance(context.attend, RowAttend) or tokens.numel() == 0:
            return tokens, context
        length, depends_on_length = tokens.shape[1], stack.geometry.depends_on_length
        size = self._degrees.shard_length(length)
        whole_length = size * self._ranks
        keys = self._key_gather(stack, tokens, context) if self._degrees.context_by == "keys" else None
        indices = torch.arange(whole_length, device=tokens.device).unsqueeze(0)
        indices = indices.narrow(1, self._rank * size, size) if keys is None else keys.indices

        def own(values: Tensor, padding: float) -> Tensor:
            if values.shape[-1] == 1 < length:
                return values
            values = _padded(values, whole_length, padding)
            if keys is None:
                return values.narrow(-1, self._rank * size, size)
            return values.expand(len(tokens), -1).gather(1, indices)

        def cut(values: Tensor | None, padding: float) -> Tensor | None:
            return None if values is None else own(values, padding)

        positions = torch.arange(length, device=tokens.device) if context.positions is None else context.positions
        counted, lengths, documents = context.counted, context.lengths, context.documents
        if counted is None and whole_length > length:
            counted = torch.ones_like(tokens, dtype=torch.bool)
        if lengths is None and depends_on_length and documents is not None:
            lengths = document_lengths(positions, documents)
        elif lengths is None and depends_on_length:
            lengths = positions.reshape(-1, length).amax(dim=1, keepdim=True) + 1
        part = (self._rank, self._ranks)
        drop = DropoutShard(sequence=part, heads=part) if keys is None else DropoutShard(indices=keys.host_indices)
        shard = SequenceShard(
            indices=indices,
            num_chunks=1 if keys is None else CHUNKS,
            length=length,
            whole_length=whole_length,
            documents=None if documents is None else _padded(documents, whole_length, PADDING),
            before=self._before if keys is None else keys.before,
            sum=lambda values: collectives.all_reduce_fwd(values, self._group),
            join=(lambda output: output) if context.is_tokenwise else functools.partial(self._joined, keys, length),
        )
        if context.is_tokenwise:
            self._pass.cut_targets = lambda targets: own(targets.view(tokens.shape), IGNORED).flatten()
        return own(tokens, 0), dataclasses.replace(
            context,
            positions=cut(positions, 0),
            lengths=cut(lengths, 1),
            documents=cut(documents, PADDING),
            counted=cut(counted, 0),
            token_types=cut(context.token_types, 0),
            attend=keys or HeadExchange(context.attend, self._group, length, drops=_drops_weights(stack, context)),
            dropout=None if context.dropout is None else dataclasses.replace(context.dropout, shard=drop),
            shard=shard,
        )

    def _key_gather(self, stack: Any, tokens: Tensor, context: Context) -> KeyGather:
        """The cut of a batch and its attention."""
        attend, degrees = context.attend, self._degrees
        if not isinstance(attend, CausalAttend | DocumentAttend):
            fix = "parallel.context_by=heads takes any attention of whole rows"
            raise ModelError("this attention has no documents", got=attend, expected="CausalAttend", fix=fix)
        documents, is_causal = attend.host_documents, isinstance(attend, CausalAttend)
        numbers = np.zeros(tokens.shape, np.int64)
        if documents is not None and not is_fake(documents):
            numbers = documents.cpu().long().numpy()
        missing = degrees.shard_length(tokens.shape[1]) * self._ranks - tokens.shape[1]
        whole = np.pad(numbers, ((0, 0), (0, missing)), constant_values=PADDING)
        cut = cut_rows(whole, self._ranks, stack.windows, is_causal=is_causal)
        if not (self._is_said or is_fake(tokens)):
            self._is_said, fullest = True, cut.work.max() / cut.work.mean()
            is_contiguous = bool((cut.owners[:, 1:] >= cut.owners[:, :-1]).all())
            way = "in neighbouring chunks, which sends fewer keys" if is_contiguous else "by counted work"
            takes_heads = stack.geometry.num_heads % (self._ranks * degrees.tensor) == 0
            also = "; parallel.context_by=heads would do as well" if takes_heads else ""
            text = "parallel.context_by=keys: rows are cut %s; work of the fullest rank, first batch: %.2f x the mean%s"
            _log.warning(text, way, fullest, also)
        drops = _drops_weights(stack, context)
        return KeyGather(cut, whole, tokens.device, self._group, is_causal=is_causal, drops=drops)

    def _before(self, totals: Tensor) -> Tensor:
        """See `SequenceShard`; totals [B, 1, ...]."""
        return collectives.all_gather(totals, self._group, 1)[:, : self._rank].sum(1, keepdim=True)

    def _joined(self, keys: KeyGather | None, length: int, output: Tensor) -> Tensor:
        whole = collectives.all_gather_autograd(output, self._group, 1) if keys is None else keys.joined(output)
        # No view, of which `fully_shard` would warn.
        return whole if whole.shape[1] == length else whole[:, :length].clone()

    def _cut_tokens_of_head(self, network: Any) -> None:
        """Let each rank compute the losses and log-probabilities of a part of the tokens [N, dim]."""
        kernels = network.kernels

        def loss(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
            own = self._own_tokens(len(hidden))
            cut = self._pass.cut_targets
            hidden, targets = (hidden[own], targets[own]) if cut is None else (hidden, cut(targets))
            total = kernels.linear_cross_entropy(hidden, weight, targets, **options)
            return collectives.all_reduce_autograd(total, self._group)

        def log_probs(
            hidden: Tensor, weight: Tensor, targets: Tensor, *further: Any, **options: Any
        ) -> tuple[Tensor, Tensor]:
            own = self._own_tokens(len(hidden))
            found = torch.stack(kernels.linear_log_probs(hidden[own], weight, targets[own], *further, **options))
            size = -(-len(hidden) // self._ranks)
            padded = functional.pad(found, (0, size - found.shape[1]))
            whole = collectives.all_gather_autograd(padded, self._group, 1)
            chosen, entropies = whole[:, : len(hidden)].unbind()
            return chosen, entropies

        network.kernels = dataclasses.replace(kernels, linear_cross_entropy=loss, linear_log_probs=log_probs)

    def _own_tokens(self, count: int) -> slice:
        size = -(-count // self._ranks)
        return slice(min(self._rank * size, count), min((self._rank + 1) * size, count))


def _drops_weights(stack: Any, context: Context) -> bool:
    drops = any(each is not None and each.attention.config.dropout > 0 for each in stack.blocks)
    return drops and context.dropout is not None


def _padded(values: Tensor, length: int, padding: float) -> Tensor:
    """Values [..., T] with padding at the end."""
    missing = length - values.shape[-1]
    return functional.pad(values, (0, missing), value=padding) if missing else values
