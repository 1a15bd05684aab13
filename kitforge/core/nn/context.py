"""What a forward pass is told besides its tokens: positions, who may look at whom, and the key of its dropout.

B batch, T length. Objects are handed in; no layer reads a global.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from kitforge.core.kernels.dispatch import Attention as AttentionKernel
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

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """See `Attend`."""
        length = query.shape[2]
        window = spec.window if spec.window is not None and spec.window < length else None
        if (length, window) not in self._masks:
            self._masks[length, window] = self._mask(length, window, query.device)
        mask = self._masks[length, window]
        return spec.kernel(query, key, value, mask=mask, causal=True, scale=spec.scale)

    def _mask(self, length: int, window: int | None, device: torch.device) -> Tensor | None:
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
class NoiseShare:
    """Which part of a mask a rank needs that holds only a part of the masked tensor: (index, parts) of its dim 1."""

    stream: tuple[int, int] = (0, 1)  # masks [B, T, dim], parted along T
    heads: tuple[int, int] = (0, 1)  # masks [B, heads, T, T], parted along the heads

    def of(self, shape: torch.Size) -> tuple[int, int]:
        """The part of a mask of that many dims."""
        return self.heads if len(shape) == 4 else self.stream


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """Names the noise of one forward pass: the same key gives the same masks, whatever the micro-batch split."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the global index of every row
    share: NoiseShare = NoiseShare()

    # A compiler that looked inside would make one graph for each name and step. The public `torch.compiler.disable`
    # is the same, but loads the compiler (1.5 s) as soon as this module is imported.
    @_disable_dynamo
    def mask(self, name: str, shape: torch.Size, rate: float, like: Tensor) -> Tensor:
        """A mask of `shape` [B, ...] holding 0 with probability `rate`, else 1 / (1 - rate); row by row, so that a
        row's noise depends on the row alone. Where `shape` is a share's, the whole is drawn and cut."""
        index, parts = self.share.of(shape)
        whole = (shape[1] * parts, *shape[2:])
        rows = [
            torch.rand(whole, generator=seed.generator(self.seed, "dropout", self.step, name, sample)).narrow(
                0, index * shape[1], shape[1]
            )
            for sample in self.samples
        ]
        return (torch.stack(rows) >= rate).to(like.device, like.dtype) / (1.0 - rate)


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


def dropout(input: Tensor, rate: float, name: str, key: DropoutKey | None) -> Tensor:
    """`input` [B, ...] with each element zeroed with probability `rate` under `key`; unchanged without a key."""
    if rate == 0.0 or key is None:
        return input
    mask: Tensor = key.mask(name, input.shape, rate, input)
    return input * mask
