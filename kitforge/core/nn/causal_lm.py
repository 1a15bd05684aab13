"""What every language model offers to training and inference, so that neither needs to know a family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes that a key-value cache and a memory plan need."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    depends_on_length: bool = False  # whether the keys of a text depend on how long it will become


@runtime_checkable
class CausalLM(Protocol):
    """A decoder over tokens [B, T]. `forward` is `head(hidden(tokens))`: logits [B, T, vocab]."""

    geometry: Geometry
    kernels: Kernels

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The last layer's normalised output [B, T, dim]."""
        ...

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]."""
        ...

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [vocab, dim], for losses that need no logits."""
        ...

    def __call__(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, T, vocab]."""
        ...
