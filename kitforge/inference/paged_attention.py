"""The paged KV cache of all running sequences, and attention over it.

N tokens of a step, of any number of sequences, in one row; D head_dim. A slot is one position of a block: block b of
size s has the slots b * s to b * s + s - 1.
"""

import functools
import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.core.kernels.attention.packed_mask import PackedMask
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.context import AttentionSpec, causal_mask
from kitforge.foundation.errors import ModelError


class KeyValueCache:
    """For each layer a slab [slots, kv_heads, D] of keys and one of values; one spare block follows the others."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_slots = self.spare_slot = num_blocks * block_size
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The slabs of a layer, allocated when its first key [.., kv_heads, .., D] arrives, since a rank may hold only
        some of the heads. They begin as zeros: masked values must be finite."""
        slabs = self._slabs.get(layer)
        if slabs is None:
            shape = (self.num_slots + self.block_size, like.shape[1], like.shape[3])
            slabs = self._slabs[layer] = (_zeros(shape, like), _zeros(shape, like))
        return slabs

    def copy(self, copies: Mapping[int, int]) -> None:
        """Copy blocks, {destination: source}; all sources are read before any block is written."""
        for pair in self._slabs.values():
            for slab in pair:
                blocks = slab.view(-1, self.block_size, *slab.shape[1:])
                blocks[list(copies)] = blocks[list(copies.values())]

    def clear(self, blocks: list[int]) -> None:
        """Set blocks to zero, so that they hold no NaN."""
        for pair in self._slabs.values():
            for slab in pair:
                slab.view(-1, self.block_size, *slab.shape[1:])[blocks] = 0

    def num_bytes(self) -> int:
        """Memory of the slabs."""
        return sum(slab.nbytes for pair in self._slabs.values() for slab in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSpan:
    """Tokens `first` .. `first + num_tokens - 1` of a step: the last ones of a sequence of `length` tokens."""

    first: int
    num_tokens: int
    length: int
    start: int | None  # the slot of the sequence's first token, if its blocks are consecutive
    slots: Tensor | None  # [length], if they are not


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBatch:
    """Spans that follow each other, whose keys are gathered and attended to in one call."""

    spans: list[PrefillSpan]
    slots: Tensor  # of the keys of all spans, [keys]
    queries: tuple[Tensor, int]  # see `PackedMask`
    keys: tuple[Tensor, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Tokens `first` .. `first + len(lengths) - 1` of a step, each the last one of a sequence with consecutive
    blocks."""

    first: int
    starts: Tensor  # [texts]
    lengths: Tensor  # [texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedBatch:
    """A `DecodeBatch` of sequences whose blocks are gathered. All shapes are fixed, as CUDA graphs need."""

    first: int
    tables: Tensor  # [texts, blocks], padded with the sequence's own last block
    lengths: Tensor  # [texts]


AttentionSegment = PrefillSpan | PrefillBatch | DecodeBatch | PagedBatch


class PagedAttention:
    """Attention of all tokens of a step, segment by segment. Is an `Attend`.

    The keys of the step are written to `slots` [N]. The segments are in the order of the tokens and cover all of them.
    """

    def __init__(self, cache: KeyValueCache, slots: Tensor, segments: list[AttentionSegment], kernels: Kernels) -> None:
        self._cache = cache
        self._kernels = kernels
        self._slots = slots
        self._segments = segments
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}  # by a span's first token and window

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Write the new keys and values [1, kv_heads, N, D] to the cache and attend; see `Attend`."""
        if spec.bias is not None:
            raise ModelError("paged attention has no learned bias of positions", got="bias", expected="none, or ALiBi")
        keys, values = self._cache.layer(spec.layer, key)
        keys.index_copy_(0, self._slots, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self._slots, value[0].transpose(0, 1).to(values.dtype))
        slabs = keys.to(query.dtype), values.to(query.dtype)
        outputs = [self._attend_segment(segment, query, slabs, spec) for segment in self._segments]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _attend_segment(
        self, segment: AttentionSegment, query: Tensor, slabs: tuple[Tensor, Tensor], spec: AttentionSpec
    ) -> Tensor:
        """The output [1, heads, tokens of the segment, D]."""
        if isinstance(segment, PrefillSpan):
            return self._attend_prefill(segment, query, slabs, spec)
        if isinstance(segment, PrefillBatch):
            return self._attend_prefills(segment, query, slabs, spec)
        num_texts = len(segment.lengths)
        tokens = query[0, :, segment.first : segment.first + num_texts].transpose(0, 1)
        kernels, lengths = self._kernels, segment.lengths
        options: Any = {"window": spec.window, "scale": spec.scale, "slopes": spec.slopes}
        if isinstance(segment, DecodeBatch):
            mixed = kernels.decode_attention(tokens, *slabs, segment.starts, lengths, **options)
        else:
            size = self._cache.block_size
            mixed = kernels.paged_attention(tokens, *slabs, segment.tables, lengths, block_size=size, **options)
        return mixed.transpose(0, 1).unsqueeze(0)

    def _attend_prefill(
        self, span: PrefillSpan, query: Tensor, slabs: tuple[Tensor, Tensor], spec: AttentionSpec
    ) -> Tensor:
        tokens = query[:, :, span.first : span.first + span.num_tokens]
        # A single token is given the keys of its window alone, so it needs no mask.
        skipped = 0 if spec.window is None or span.num_tokens > 1 else max(0, span.length - spec.window)
        if span.slots is not None:
            view = [slab.index_select(0, span.slots[skipped:]) for slab in slabs]
        else:
            assert span.start is not None
            view = [slab[span.start + skipped : span.start + span.length] for slab in slabs]
        keys, values = (each.transpose(0, 1).unsqueeze(0) for each in view)

        def mask(window: int | None) -> Tensor | None:
            if (span.first, window) not in self._masks:
                self._masks[span.first, window] = _prefill_mask(span, window, query.device)
            return self._masks[span.first, window]

        # A mask goes before `causal`.
        return spec.attend(tokens, keys, values, mask=mask, causal=span.num_tokens > 1)

    def _attend_prefills(
        self, batch: PrefillBatch, query: Tensor, slabs: tuple[Tensor, Tensor], spec: AttentionSpec
    ) -> Tensor:
        first, last = batch.spans[0].first, batch.spans[-1]
        tokens = query[:, :, first : last.first + last.num_tokens]
        keys, values = (slab.index_select(0, batch.slots).transpose(0, 1).unsqueeze(0) for slab in slabs)

        def mask(window: int | None) -> PackedMask:
            dense = functools.partial(_dense_mask, batch.spans, window, query.device)
            return PackedMask(*batch.queries, window, dense, batch.keys)

        return spec.attend(tokens, keys, values, mask=mask, causal=True)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros; on CPU as anonymous pages, which take memory only once they are written."""
    if not like.is_cpu:
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def _prefill_mask(span: PrefillSpan, window: int | None, device: torch.device) -> Tensor | None:
    """The mask [tokens, keys]; None for a single token, and where the plain causal mask holds."""
    is_full_causal = span.num_tokens == span.length and (window is None or window >= span.length)
    if span.num_tokens == 1 or is_full_causal:
        return None
    positions = torch.arange(span.length, device=device)
    return causal_mask(positions[span.length - span.num_tokens :], positions, window)


def _dense_mask(spans: list[PrefillSpan], window: int | None, device: torch.device) -> Tensor:
    """Boolean [1, 1, tokens, keys] of all spans."""
    parts = []
    for span in spans:
        positions = torch.arange(span.length, device=device)
        parts.append(causal_mask(positions[span.length - span.num_tokens :], positions, window))
    whole: Tensor = torch.block_diag(*parts)  # type: ignore[no-untyped-call]
    return whole.bool()[None, None]
