"""Keys and values of all running texts, and the attention over them.

N tokens of a step, of any number of texts, in one row; D head_dim. A slot is one position of a block: block b of size s
has the slots b * s to b * s + s - 1.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from kitforge.core.kernels.dispatch import TokenAttention
from kitforge.core.nn.context import AttentionSpec, causal_mask


@final
class KeyValueCache:
    """For each layer a slab [slots, kv_heads, D] of keys and one of values. Behind the blocks there is a spare one."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_slots = self.spare_slot = num_blocks * block_size
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The slabs of a layer; made when its first key [.., kv_heads, .., D] comes, as a rank may hold only some of
        the heads. Zero from the start: what a mask hides must still be a number."""
        found = self._slabs.get(layer)
        if found is None:
            shape = (self.num_slots + self.block_size, like.shape[1], like.shape[3])
            found = self._slabs[layer] = (_zeros(shape, like), _zeros(shape, like))
        return found

    def copy(self, copies: Mapping[int, int]) -> None:
        """Copy whole blocks, {to: from}; all are read before any is written."""
        for pair in self._slabs.values():
            for slab in pair:
                blocks = slab.view(-1, self.block_size, *slab.shape[1:])
                blocks[list(copies)] = blocks[list(copies.values())]

    def clear(self, blocks: list[int]) -> None:
        """Make them zero again, so that they hold numbers."""
        for pair in self._slabs.values():
            for slab in pair:
                slab.view(-1, self.block_size, *slab.shape[1:])[blocks] = 0

    def num_bytes(self) -> int:
        """What the slabs take."""
        return sum(slab.nbytes for pair in self._slabs.values() for slab in pair)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Tokens `first` .. `first + num_tokens - 1` of a step, the last ones of a text of `length` tokens."""

    first: int
    num_tokens: int
    length: int
    start: int | None  # the slot of the text's first token, if the others follow it one by one
    slots: Tensor | None  # [length], if they do not


@dataclass(frozen=True, slots=True, kw_only=True)
class Singles:
    """Tokens `first` .. `first + len(lengths) - 1` of a step, each the last one of a text whose slots follow
    one another from where it starts."""

    first: int
    starts: Tensor  # [texts]
    lengths: Tensor  # [texts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """The same for texts whose blocks lie anywhere and are gathered; every tensor has a fixed shape, as recorded steps
    need."""

    first: int
    tables: Tensor  # [texts, blocks], filled up with the text's own last block
    lengths: Tensor  # [texts]


Part = Stretch | Singles | Pages


@final
class CachedAttend:
    """Attends for all tokens of a step, part by part. Is an `Attend`.

    `slots` [N] is where the step's keys go; parts are in the order of the tokens and leave none out.
    """

    def __init__(self, cache: KeyValueCache, slots: Tensor, parts: list[Part], token_attention: TokenAttention) -> None:
        self._cache = cache
        self._token_attention = token_attention
        self._slots = slots
        self._parts = parts
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Write the new keys and values [1, kv_heads, N, D], attend to all that are seen; see `Attend`."""
        keys, values = self._cache.layer(spec.layer, key)
        keys.index_copy_(0, self._slots, key[0].transpose(0, 1).to(keys.dtype))
        values.index_copy_(0, self._slots, value[0].transpose(0, 1).to(values.dtype))
        slabs = keys.to(query.dtype), values.to(query.dtype)
        outputs = [self._part(place, part, query, slabs, spec) for place, part in enumerate(self._parts)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)

    def _part(self, place: int, part: Part, query: Tensor, slabs: tuple[Tensor, Tensor], spec: AttentionSpec) -> Tensor:
        """The mixture [1, heads, tokens of the part, D]."""
        if isinstance(part, Stretch):
            return self._stretch(place, part, query, slabs, spec)
        num_texts = len(part.lengths)
        if isinstance(part, Singles):
            tokens = query[0, :, part.first : part.first + num_texts].transpose(0, 1)
            window, scale = spec.window, spec.scale
            mixed = self._token_attention(tokens, *slabs, part.starts, part.lengths, window=window, scale=scale)
            return mixed.transpose(0, 1).unsqueeze(0)
        view = [_pages(slab, part.tables, self._cache.block_size) for slab in slabs]
        if (place, spec.window) not in self._masks:
            self._masks[place, spec.window] = _length_mask(part, view[0].shape[2], spec.window, query.device)
        # Each token is a text of its own, [texts, heads, 1, D].
        tokens = query[:, :, part.first : part.first + num_texts].transpose(0, 2)
        mask = self._masks[place, spec.window]
        return spec.kernel(tokens, *view, mask=mask, causal=False, scale=spec.scale).transpose(0, 2)

    def _stretch(
        self, place: int, part: Stretch, query: Tensor, slabs: tuple[Tensor, Tensor], spec: AttentionSpec
    ) -> Tensor:
        tokens = query[:, :, part.first : part.first + part.num_tokens]
        # A single token sees its window and nothing else, so that it needs no mask.
        skipped = 0 if spec.window is None or part.num_tokens > 1 else max(0, part.length - spec.window)
        if part.slots is not None:
            view = [slab.index_select(0, part.slots[skipped:]) for slab in slabs]
        else:
            assert part.start is not None
            view = [slab[part.start + skipped : part.start + part.length] for slab in slabs]
        view = [each.transpose(0, 1).unsqueeze(0) for each in view]
        if (place, spec.window) not in self._masks:
            self._masks[place, spec.window] = _stretch_mask(part, spec.window, query.device)
        mask = self._masks[place, spec.window]
        causal = mask is None and part.num_tokens > 1
        return spec.kernel(tokens, *view, mask=mask, causal=causal, scale=spec.scale)


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros. Of a processor's memory they take nothing where they are never written to, as most of a cache is not."""
    if not like.is_cpu:
        return like.new_zeros(shape)
    num_bytes = math.prod(shape) * like.element_size()
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype).view(shape)


def _pages(slab: Tensor, tables: Tensor, block_size: int) -> Tensor:
    """[texts, kv_heads, positions, D], gathered."""
    num_texts, num_blocks = tables.shape
    blocks = slab.view(-1, block_size, *slab.shape[1:])[tables]
    return blocks.view(num_texts, num_blocks * block_size, *slab.shape[1:]).transpose(1, 2)


def _length_mask(part: Pages, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[texts, 1, 1, keys]."""
    positions = torch.arange(num_keys, device=device)
    return causal_mask(part.lengths.unsqueeze(1) - 1, positions, window).unsqueeze(1)


def _stretch_mask(part: Stretch, window: int | None, device: torch.device) -> Tensor | None:
    """[tokens, keys]; None where a single token sees all that it is shown, or the plain causal mask holds."""
    is_whole = part.num_tokens == part.length and (window is None or window >= part.length)
    if part.num_tokens == 1 or is_whole:
        return None
    positions = torch.arange(part.length, device=device)
    return causal_mask(positions[part.length - part.num_tokens :], positions, window)
