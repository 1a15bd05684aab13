"""The capabilities of a language model, as protocols: training, parallelism and inference need no family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.context import Context, DropoutKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes for a key-value cache and a memory plan."""

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    depends_on_length: bool = False  # whether the keys of a sequence depend on its final length
    num_experts: int = 0  # of a block with a mixture of experts; 0: no block has one
    is_causal: bool = True  # whether a token sees those before it alone

    @classmethod
    def of(cls, blocks: Sequence[BlockConfig], vocab_size: int, max_length: int, **further: Any) -> Geometry:
        """That of a stack of blocks with equal attention."""
        attention = blocks[0].attention
        return cls(
            vocab_size=vocab_size,
            dim=attention.dim,
            num_layers=len(blocks),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            max_length=max_length,
            **further,
        )


@runtime_checkable
class CausalLM(Protocol):
    """A decoder over tokens [B, T]. `forward` is `head(hidden(tokens))`: logits [B, T, vocab]."""

    geometry: Geometry
    kernels: Kernels

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The normalized output [B, T, dim] of the last layer."""

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]."""

    @property
    def head_weight(self) -> Tensor:
        """The head's matrix [vocab, dim], for losses that need no logits."""

    def __call__(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, T, vocab]."""


def padded_context(network: CausalLM, tokens: Tensor, lengths: Tensor, dropout: DropoutKey | None = None) -> Context:
    """The context of rows of tokens [B, T] of these lengths [B], with padding behind them. A causal network does not
    read it, so documents would only cost a mask."""
    if network.geometry.is_causal:
        return Context(dropout=dropout)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    documents = torch.where(positions < lengths.to(tokens.device).unsqueeze(1), 0, -1)
    return Context(documents=documents, dropout=dropout)


@runtime_checkable
class Quantizable(CausalLM, Protocol):
    """A language model whose linear layers are all `core.nn.linear.Linear`, so that another kernel can run them."""

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its modules, and no axis of parallelism and no adapter has wrapped them."""


@runtime_checkable
class Shardable(CausalLM, Protocol):
    """A language model of `Stack`s with the names of the shared decoder, so that one declaration splits its modules."""

    @property
    def head_name(self) -> str:
        """The parameter that is `head_weight`."""


@runtime_checkable
class Trainable(CausalLM, Protocol):
    """A language model whose training can be configured."""

    recompute: Recompute  # activation checkpointing: what of a block the backward pass computes again

    def compile_blocks(self) -> None:
        """Let torch compile each block (level O2)."""

    def freeze_head(self) -> None:
        """Do not train the head, for models that read hidden states only. A head tied to the embedding stays."""
