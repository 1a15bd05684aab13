"""The context of a forward pass besides its tokens: positions, attention masks, the key of its dropout.

B batch, T length. No layer reads a global.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kitforge.core.kernels.attention.packed_mask import PackedMask, find_boundaries, row_boundaries, takes_packed
from kitforge.core.kernels.attention.reference import AttentionKernel, Mask
from kitforge.core.kernels.dispatch import select
from kitforge.foundation import seed
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The parameters of an attention layer for an `Attend`, which calls `attend` or obeys each of them itself."""

    layer: int
    kernel: AttentionKernel
    scale: float
    window: int | None = None  # a query sees itself and the `window` - 1 keys before it
    slopes: Tensor | None = None  # of ALiBi [heads], of the heads on this rank
    bias: Tensor | None = None  # learned [heads, queries, keys], of the heads on this rank

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Callable[[int | None], Mask],
        causal: bool,
        distances: Tensor | None = None,
    ) -> Tensor:
        """The kernel's output with all parameters of the layer. `mask` gives the mask of a window; None: see
        `AttentionKernel`. `distances` [queries, keys] or [B, queries, keys] are the positions of keys minus those of
        queries, where tokens that follow one another are not at consecutive positions."""
        slopes, bias = self.slopes, self.bias
        if slopes is not None and distances is not None:
            alibi = slopes.view(-1, 1, 1) * distances.unsqueeze(-3)
            slopes, bias = None, alibi if bias is None else bias + alibi
        seen = mask(self.window)
        return self.kernel(query, key, value, mask=seen, causal=causal, scale=self.scale, slopes=slopes, bias=bias)


class Attend(Protocol):
    """Computes the attention of every layer: causal and packed attention below, paged attention in `inference`.

    query [B, heads, T, head_dim]; key, value [B, kv_heads, T, head_dim].
    """

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """The attention output [B, heads, T, head_dim]."""


class RowAttend(ABC):
    """Attention within the rows of a batch, as in training: without a cache."""

    def prepare(self, stream: Tensor, length: int, windows: Iterable[int | None], head_dim: int) -> None:
        """Called before the first layer with the stream [B, T or a shard of it, dim], the length of its rows, and the
        windows of all layers. Default: nothing."""

    @abstractmethod
    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `Attend`."""


class CausalAttend(RowAttend):
    """Causal attention within each document.

    `documents` [B, T] is the document number of every token; tokens do not attend to those of other documents, so
    padding is a document of its own. None: each row is one document. `boundaries` are those of the documents, which a
    kernel on a GPU takes in place of a mask; they are found on the CPU, since their number depends on the numbers.
    """

    def __init__(self, documents: Tensor | None = None, boundaries: tuple[Tensor, int] | None = None) -> None:
        self.documents = self.host_documents = documents  # the latter on the CPU if they were there first
        self._boundaries = boundaries
        self._masks: dict[tuple[int, int | None], Tensor | PackedMask] = {}

    def prepare(self, stream: Tensor, length: int, windows: Iterable[int | None], head_dim: int) -> None:
        """Make the masks of layers with these windows, for rows of `length` tokens and a stream [B, T or a shard of it,
        dim]. If the first layer made them and the others reused them, torch.compile would need two graphs for each
        shape."""
        for window in windows:
            self._mask(stream, length, head_dim, window)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        mask = functools.partial(self._mask, query, query.shape[2], query.shape[3])
        return spec.attend(query, key, value, mask=mask, causal=True)

    def _mask(self, input: Tensor, length: int, head_dim: int, window: int | None) -> Mask:
        """For queries of the rows, device and dtype of `input`; None for plain causal attention."""
        window = window if window is not None and window < length else None
        if self.documents is None and window is None:
            return None
        if (length, window) not in self._masks:
            dense = functools.partial(_dense_mask, self.documents, length, window, input.device)
            rows = row_boundaries(len(input), length, input.device)
            boundaries = rows if self.documents is None else self._boundaries
            if boundaries is None or not takes_packed(input, head_dim):
                self._masks[length, window] = dense()
            else:
                self._masks[length, window] = PackedMask(*boundaries, window, dense)
        return self._masks[length, window]


class DocumentAttend(RowAttend):
    """Attention in both directions within each document, as in an encoder. `documents` is that of `CausalAttend`."""

    def __init__(self, documents: Tensor | None = None) -> None:
        self.host_documents = documents
        self._mask = None if documents is None else (documents.unsqueeze(2) == documents.unsqueeze(1)).unsqueeze(1)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        return spec.attend(query, key, value, mask=self._masked, causal=False)

    def _masked(self, window: int | None) -> Tensor | None:
        if window is not None:
            raise ModelError("attention in both directions has no window", got=f"window={window}", expected="none")
        return self._mask


def _dense_mask(documents: Tensor | None, length: int, window: int | None, device: torch.device) -> Tensor:
    """Boolean [length, length] or [B, 1, length, length]."""
    positions = torch.arange(length, device=device)
    mask = causal_mask(positions, positions, window)
    return mask if documents is None else (mask & (documents.unsqueeze(2) == documents.unsqueeze(1))).unsqueeze(1)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Boolean [..., queries, keys]: a query at position p attends to keys at p - window + 1 .. p."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutShard:
    """The shard of a dropout mask on a rank that holds a shard of the masked tensor: (index, parts) of dim 1."""

    # [B, t] on the CPU: the indices in whole rows of the tokens that `sequence` is a shard of; None: all of a row
    indices: Tensor | None = None
    sequence: tuple[int, int] = (0, 1)  # masks [B, T, dim], sharded along T
    heads: tuple[int, int] = (0, 1)  # masks [B, heads, T, T], sharded along the heads


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """The key of the dropout masks of a forward pass; they do not depend on the split into micro-batches."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the global index of each row
    shard: DropoutShard = DropoutShard()
    # As tensors, which are inputs of a graph to torch.compile; a Python number would need a graph of its own.
    _step: Tensor = field(init=False, repr=False, compare=False)  # int64 [], of seed and step
    _rows: Tensor = field(init=False, repr=False, compare=False)  # int64 [B]

    def __post_init__(self) -> None:
        step = torch.tensor(seed.key(self.seed, "dropout", self.step), device="cpu")
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "_rows", torch.tensor(self.samples, dtype=torch.int64, device="cpu"))

    def mask(self, name: str | Tensor, shape: torch.Size, rate: float, device: torch.device) -> Tensor:
        """A boolean mask of `shape` [B, ...], False with probability `rate`. The mask of a row depends on the row
        alone, not on its padding, and that of a shard is the shard of the whole mask. `name` is a string, or its
        `dropout_name_key`."""
        name = dropout_name_key(name) if isinstance(name, str) else name
        rows, count, indices = self._rows.to(device), shape[1:].numel(), self.shard.indices
        first = self.shard.sequence[0] * count
        if len(shape) == 4:
            # Attention weights: the place of an element in a row of them depends on the number of keys, padding
            # included, so that each query of each head has a row of its own.
            heads = torch.arange(shape[1], device=device) + self.shard.heads[0] * shape[1]
            queries = torch.arange(shape[2], device=device) if indices is None else indices.to(device).unsqueeze(1)
            rows = ((rows[:, None, None] << 10 | heads[:, None]) << 20 | queries).flatten()
            first, count = 0, shape[3]
        elif indices is not None:
            own = indices.chunk(self.shard.sequence[1], dim=1)[self.shard.sequence[0]]
            spread: Tensor = _keep_mask_at(self._step ^ name, rows, own, count // shape[1], rate)
            return spread.view(shape)
        # Sharded along the first dim of a row, so a shard is a contiguous range of the row's elements.
        kept: Tensor = _keep_mask(self._step ^ name, rows, first, count, rate)
        return kept.view(shape)


def dropout_name_key(name: str) -> Tensor:
    """The key of a name, int64 []. Modules that may be compiled make it once, as a tensor for the same reason."""
    return torch.tensor(seed.key("noise", name), device="cpu")


@torch.library.custom_op("kitforge::keep_mask", mutates_args=())
def _keep_mask(key: Tensor, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    """A single operation to torch.compile."""
    return select("O1", rows.device.type).keep_mask(int(key), rows, start, count, rate)


@_keep_mask.register_fake
def _(key: Tensor, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    del key, start, rate
    return rows.new_empty(len(rows), count, dtype=torch.bool)


@torch.library.custom_op("kitforge::keep_mask_at", mutates_args=())
def _keep_mask_at(key: Tensor, rows: Tensor, indices: Tensor, width: int, rate: float) -> Tensor:
    """Boolean [B, t, width]: the elements of `width` at each of the indices [B, t], on the CPU, of a row."""
    keep, found = select("O1", rows.device.type).keep_mask, []
    for number, own in enumerate(indices):
        runs = torch.tensor_split(own, (own.diff() != 1).nonzero().flatten() + 1)
        spans = [(int(run[0]) * width, len(run) * width) for run in runs]
        found += [keep(int(key), rows[number : number + 1], *span, rate).flatten() for span in spans]
    return torch.cat(found).view(*indices.shape, width)


@_keep_mask_at.register_fake
def _(key: Tensor, rows: Tensor, indices: Tensor, width: int, rate: float) -> Tensor:
    del key, rate
    return rows.new_empty(*indices.shape, width, dtype=torch.bool)


@dataclass(slots=True, kw_only=True)
class EncoderInput:
    """What a decoder with cross-attention reads: tokens [B, S], which the first pass encodes."""

    tokens: Tensor
    # [B, S]: a target token attends to the source of its own document; those of padding are in no target. None: all.
    documents: Tensor | None = None
    keeps_keys: bool = False  # keep the keys of the layers for further passes, as generation does
    states: Tensor | None = None  # the output of the encoder [B, S, dim], once there is one
    keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # of layers [B, heads, S, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceShard:
    """The place of tokens [B, T] in their rows, of which ranks have a shard each."""

    indices: Tensor  # [B or 1, T] in their rows, in rising chunks of one length
    num_chunks: int
    length: int  # of the rows, without padding at their end
    whole_length: int  # of the rows, with it
    documents: Tensor | None  # [B, whole length]
    # Of a tensor without a gradient: of totals of chunks [B, chunks, ...] the sums of those before each in its row, on
    # any rank; the sum over the ranks.
    before: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]
    join: Callable[[Tensor], Tensor]  # the outputs [B, T, dim] of all ranks as whole rows, with their gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Positions, documents, attention and dropout of a batch of tokens [B, T]."""

    positions: Tensor | None = None  # [B, T] or [T]; None counts from 0
    # [B or 1, T]: the length of each token's sequence, for position schemes that depend on it; None: computed.
    lengths: Tensor | None = None
    documents: Tensor | None = None  # [B, T] document of every token; None: each row is one document
    attend: Attend = field(default_factory=lambda: CausalAttend())
    dropout: DropoutKey | None = None  # None: no dropout
    source: EncoderInput | None = None  # of a decoder with an encoder
    token_types: Tensor | None = None  # [B, T], of an encoder of two texts; None: all 0
    past: int = 0  # the positions before these tokens that a cache holds, as a relative bias counts them
    # The factor of the loss in the backward pass, float64 [], for layers with losses of their own; None: no training.
    loss_weight: Tensor | None = None
    counted: Tensor | None = None  # boolean [B, T]: the tokens with a loss, over which such layers sum; None: all
    shard: SequenceShard | None = None  # None: the tokens are whole rows
    # The loss is `linear_cross_entropy` of all tokens and targets, so ranks that cut rows do not join them in `hidden`.
    is_tokenwise: bool = False
    # Where mixtures of experts write their load; None: into themselves, where a pass that takes turns would lose it.
    loads: dict[nn.Module, Tensor] | None = None

    def __post_init__(self) -> None:
        # Plain causal attention does not know the documents, which must be isolated.
        if self.documents is not None and isinstance(self.attend, CausalAttend) and self.attend.documents is None:
            object.__setattr__(self, "attend", CausalAttend(self.documents))

    @classmethod
    def packed(
        cls,
        positions: Tensor,
        documents: Tensor | None,
        dropout: DropoutKey | None = None,
        device: torch.device | None = None,
        counted: Tensor | None = None,
        is_tokenwise: bool = False,
    ) -> Context:
        """The context of packed rows on `device`: attention isolates the documents. Documents on the CPU give their
        boundaries without waiting for a device."""
        device = positions.device if device is None else device
        positions, counted = copy_to(positions, device), None if counted is None else copy_to(counted, device)
        given: dict[str, Any] = {"dropout": dropout, "counted": counted, "is_tokenwise": is_tokenwise}
        if documents is None:
            return cls(positions=positions, **given)
        known, host = None, documents
        if documents.is_cpu and device.type != "cpu":
            cu_seqlens, max_length = find_boundaries(documents)
            known = copy_to(cu_seqlens, device), max_length
        documents = copy_to(documents, device)
        attend = CausalAttend(documents, known)
        attend.host_documents = host
        return cls(positions=positions, documents=documents, attend=attend, **given)


def dropout(input: Tensor, rate: float, name: str | Tensor, key: DropoutKey | None) -> Tensor:
    """Inverted dropout of `input` [B, ...] with probability `rate`; the identity without a key. `name` is that of
    `DropoutKey.mask`."""
    if rate == 0.0 or key is None:
        return input
    # In place, since a second tensor of this size costs more than the mask.
    return torch.where(key.mask(name, input.shape, rate, input.device), input, 0.0).div_(1.0 - rate)
