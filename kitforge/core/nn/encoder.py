"""An encoder of tokens, as BERT: attention in both directions, token types, and a head for masked tokens.

B batch, T length.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.causal_lm import Geometry
from kitforge.core.nn.context import CausalAttend, Context, DocumentAttend, RowAttend, dropout
from kitforge.core.nn.decoder import DecoderFamily
from kitforge.core.nn.init import unfilled_embedding
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.norm import Norm
from kitforge.core.nn.stack import Stack
from kitforge.foundation.config import check
from kitforge.foundation.errors import ModelError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class EncoderFamily(DecoderFamily, Protocol):
    """The options of a family of encoders, whose `decoder` is the stack."""

    @property
    def num_token_types(self) -> int:
        """Rows of the table of token types."""

    @property
    def first_position(self) -> int:
        """The row of the table of positions for the first token."""

    @property
    def head_activation(self) -> str:
        """Of the head for masked tokens: gelu, gelu_tanh or relu."""

    @property
    def lm_head(self) -> bool:
        """Whether it has a head for masked tokens."""


class Encoder(Stack):
    """Tokens [B, T] -> logits [B, T, vocab] (Devlin et al., 2019). Tokens attend to all others of their document in
    `context.documents`, where padding has a number of its own. The head is tied to the embedding."""

    head_name = "embedding.weight"  # the parameter that is `head_weight`

    def __init__(self, config: EncoderFamily, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        shape = config.decoder()
        block = shape.blocks[0]
        dim = block.attention.dim
        self.config = config
        self.kernels = kernels
        self.geometry = Geometry.of(shape.blocks, shape.vocab_size, shape.max_length, is_causal=False)
        self.embedding = unfilled_embedding(shape.vocab_size, dim)
        self.position = unfilled_embedding(shape.max_length + config.first_position, dim)
        self.token_type = unfilled_embedding(config.num_token_types, dim)
        self.embedding_norm = Norm(block.norm, dim, block.norm_eps, kernels)
        self.add_blocks(shape.blocks, kernels)
        self.head_dense = Linear(dim, dim, bias=True, kernels=kernels) if config.lm_head else None
        self.head_norm = Norm("layer", dim, block.norm_eps, kernels) if config.lm_head else None
        self.head_bias = nn.Parameter(torch.empty(shape.vocab_size)) if config.lm_head else None
        self._activation = _ACTIVATIONS[config.head_activation]
        self._first_position, self._rate = config.first_position, shape.embedding_dropout

    @property
    def head_weight(self) -> Tensor:
        """The embedding [vocab, dim]; of a stage without it, only device and dtype, an empty matrix."""
        embedding: Tensor | None = getattr(self.embedding, "weight", None)
        return self.absent_head() if embedding is None else embedding

    def stage_pass(
        self, input: Tensor, context: Context, stream: Tensor | None = None, layers: range | None = None
    ) -> Tensor:
        """See `Stack`, with attention in both directions. Raises ModelError for a cache, which knows no later token,
        ConfigError for a text that is too long."""
        if isinstance(context.attend, CausalAttend):
            context = replace(context, attend=DocumentAttend(context.attend.documents))
        elif not isinstance(context.attend, RowAttend):
            raise ModelError("an encoder has no cache", fix="generate with a language model, such as llama")
        length, longest = input.shape[1], self.geometry.max_length
        check(length <= longest, "data.sequence_length", length, f"at most the model's max_length={longest}")
        return super().stage_pass(input, context, stream, layers)

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, T, dim] of tokens [B, T] into the first block: tokens, positions and token types (None: 0),
        then a norm."""
        positions = context.positions
        if positions is None:
            positions = torch.arange(input.shape[1], device=input.device)
        types = torch.zeros_like(input[:1]) if context.token_types is None else context.token_types
        stream = self.embedding(input) + self.position(positions + self._first_position) + self.token_type(types)
        return dropout(self.embedding_norm.unrounded(stream), self._rate, "embedding", context.dropout)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]. Raises ModelError without the head."""
        if self.head_dense is None or self.head_norm is None or self.head_bias is None:
            raise ModelError("this encoder has no head for masked tokens", fix="train it: task=masked_lm")
        hidden = self._activation(self.head_dense(hidden))
        logits = self.kernels.linear(self.head_norm(hidden), self.head_weight)
        return logits + self.head_bias.to(logits.dtype)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, T, vocab]."""
        return self.head(self.hidden(tokens, context))

    def freeze_head(self) -> None:
        """Do not train the head, for models that read hidden states only. The embedding stays."""
        for parameter in (self.head_dense, self.head_norm, self.head_bias):
            if parameter is not None:
                parameter.requires_grad_(False)
