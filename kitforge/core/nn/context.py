"""What a forward pass is told besides its tokens: positions, who may look at whom, and the key of its dropout.

B batch, T length. Objects are handed in; no layer reads a global.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from kitforge.core.kernels.attention.reference import AttentionKernel
from kitforge.core.kernels.dispatch import select
from kitforge.foundation import seed


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What an attention layer asks of whatever attends for it."""

    layer: int
    kernel: AttentionKernel
    scale: float
    window: int | None = None  # a query sees itself and the `window` - 1 keys before it


class Attend(Protocol):
    """Attends for every layer of a model: plain and packed attention below, cached attention in `inference`, ring
    attention in `core.parallel`. query [B, heads, T, head_dim]; key, value [B, kv_heads, T, head_dim]."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """The mixture [B, heads, T, head_dim]."""
        ...


class CausalAttend:
    """Causal attention within each document.

    `documents` [B, T] numbers the document of every token; tokens of different numbers do not see one another, so
    padding is a document of its own. None: each row is one document.
    """

    def __init__(self, documents: Tensor | None = None) -> None:
        self._documents = documents
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}

    @property
    def isolates(self) -> bool:
        """Whether it keeps documents apart."""
        return self._documents is not None

    def prepare(self, length: int, windows: Iterable[int | None], device: torch.device) -> None:
        """Make the masks of layers with these windows. A compiler that saw the first layer make them and the others
        find them would need two graphs for each shape."""
        for window in windows:
            self._mask(length, window, device)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `Attend`."""
        mask = self._mask(query.shape[2], spec.window, query.device)
        return spec.kernel(query, key, value, mask=mask, causal=True, scale=spec.scale)

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        window = window if window is not None and window < length else None
        if (length, window) not in self._masks:
            self._masks[length, window] = self._made(length, window, device)
        return self._masks[length, window]

    def _made(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
        if self._documents is None and window is None:
            return None
        seen = causal_mask(torch.arange(length, device=device), torch.arange(length, device=device), window)
        if self._documents is None:
            return seen
        return (seen & (self._documents.unsqueeze(2) == self._documents.unsqueeze(1))).unsqueeze(1)


def causal_mask(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """Boolean [..., queries, keys]: a query at position p sees keys at p - window + 1 .. p."""
    distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutShard:
    """Which part of a mask a rank needs that holds only a part of the masked tensor: (index, parts) of its dim 1."""

    sequence: tuple[int, int] = (0, 1)  # masks [B, T, dim], parted along T
    heads: tuple[int, int] = (0, 1)  # masks [B, heads, T, T], parted along the heads

    def of(self, shape: torch.Size) -> tuple[int, int]:
        """The part of a mask of that many dims."""
        return self.heads if len(shape) == 4 else self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """Names the noise of one forward pass: the same key gives the same masks, whatever the micro-batch split."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the global index of every row
    shard: DropoutShard = DropoutShard()
    # The numbers above as tensors: to a compiler those are inputs of a graph, and a number would need one of its own.
    _step: Tensor = field(init=False, repr=False, compare=False)  # int64 [], of seed and step
    _rows: Tensor = field(init=False, repr=False, compare=False)  # int64 [B]

    def __post_init__(self) -> None:
        step = torch.tensor(seed.key(self.seed, "dropout", self.step), device="cpu")
        object.__setattr__(self, "_step", step)
        object.__setattr__(self, "_rows", torch.tensor(self.samples, dtype=torch.int64, device="cpu"))

    def mask(self, name: str | Tensor, shape: torch.Size, rate: float, device: torch.device) -> Tensor:
        """A boolean mask of `shape` [B, ...] that is False with probability `rate`. A row's noise depends on the row
        alone, and that of a share is its part of the whole. `name` is a text, or `noise_name` of one."""
        index, _ = self.shard.of(shape)
        count = shape[1:].numel()
        name = dropout_name_key(name) if isinstance(name, str) else name
        # A share is cut from the first dim of a row, so it is a stretch of the row's elements.
        kept: Tensor = _keep_mask(self._step ^ name, self._rows.to(device), index * count, count, rate)
        return kept.view(shape)


def dropout_name_key(name: str) -> Tensor:
    """The number of a name, int64 []. Modules that may be compiled make it once, for the reason given above."""
    return torch.tensor(seed.key("noise", name), device="cpu")


@torch.library.custom_op("kitforge::keep_mask", mutates_args=())
def _keep_mask(key: Tensor, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    """A single operation to a compiler."""
    return select("O1", rows.device.type).keep_mask(int(key), rows, start, count, rate)


@_keep_mask.register_fake
def _(key: Tensor, rows: Tensor, start: int, count: int, rate: float) -> Tensor:
    del key, start, rate
    return rows.new_empty(len(rows), count, dtype=torch.bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """How a batch of tokens [B, T] is to be read."""

    positions: Tensor | None = None  # [B, T] or [T]; None counts from 0
    # [B or 1, T]: how long the text around each token is, for position schemes that depend on it; None measures it.
    lengths: Tensor | None = None
    documents: Tensor | None = None  # [B, T] document of every token; None: each row is one document
    attend: Attend = field(default_factory=CausalAttend)
    dropout: DropoutKey | None = None  # None: no dropout

    def __post_init__(self) -> None:
        # Documents that are named here must be isolated, and the plain attention does not know of them.
        if self.documents is not None and isinstance(self.attend, CausalAttend) and not self.attend.isolates:
            object.__setattr__(self, "attend", CausalAttend(self.documents))

    @classmethod
    def packed(cls, positions: Tensor, documents: Tensor | None, dropout: DropoutKey | None = None) -> Context:
        """The context of packed rows, documents isolated from one another."""
        return cls(positions=positions, documents=documents, dropout=dropout)


def dropout(input: Tensor, rate: float, name: str | Tensor, key: DropoutKey | None) -> Tensor:
    """`input` [B, ...] with each element zeroed with probability `rate` under `key`, and the others scaled so that the
    mean stays; unchanged without a key. See `DropoutKey.mask` for the name."""
    if rate == 0.0 or key is None:
        return input
    # In place, since a second tensor of this size would cost more than the noise.
    return torch.where(key.mask(name, input.shape, rate, input.device), input, 0.0).div_(1.0 - rate)
