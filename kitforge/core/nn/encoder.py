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
from kitforge.core.nn.context import CausalAttend, Context, DocumentAttend, RowAttend, dropout
from kitforge.core.nn.decoder import Decoder, DecoderFamily
from kitforge.core.nn.init import unfilled_embedding
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.norm import Norm
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
        ...

    @property
    def first_position(self) -> int:
        """The row of the table of positions for the first token."""
        ...

    @property
    def head_activation(self) -> str:
        """Of the head for masked tokens: gelu, gelu_tanh or relu."""
        ...

    @property
    def lm_head(self) -> bool:
        """Whether it has a head for masked tokens."""
        ...


class Encoder(Decoder):
    """Tokens [B, T] -> logits [B, T, vocab] (Devlin et al., 2019). Tokens attend to all others of their document in
    `context.documents`, where padding has a number of its own. The head is tied to the embedding."""

    def __init__(self, config: EncoderFamily, kernels: Kernels = REFERENCE) -> None:
        super().__init__(config, kernels)
        dim, shape = self.geometry.dim, config.decoder()
        self.geometry = replace(self.geometry, is_causal=False)
        self.position = unfilled_embedding(shape.max_length + config.first_position, dim)
        self.token_type = unfilled_embedding(config.num_token_types, dim)
        self.head_dense = Linear(dim, dim, bias=True, kernels=kernels) if config.lm_head else None
        self.head_norm = Norm("layer", dim, shape.blocks[0].norm_eps, kernels) if config.lm_head else None
        self.head_bias = nn.Parameter(torch.empty(shape.vocab_size)) if config.lm_head else None
        self._first_position = config.first_position
        self._activation = _ACTIVATIONS[config.head_activation]

    def stage_pass(
        self, input: Tensor, context: Context, stream: Tensor | None = None, layers: range | None = None
    ) -> Tensor:
        """See `Stack`, with attention in both directions. Raises ModelError for a cache, which knows no later token."""
        if isinstance(context.attend, CausalAttend):
            context = replace(context, attend=DocumentAttend(context.attend.documents))
        elif not isinstance(context.attend, RowAttend):
            raise ModelError("an encoder has no cache", fix="generate with a language model, such as llama")
        return super().stage_pass(input, context, stream, layers)

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, T, dim] of tokens [B, T] into the first block: tokens, positions and token types (None: 0),
        then a norm."""
        assert self.position is not None and self.embedding_norm is not None
        stream = self.embedding(input) + self.position(self._positions(input, context) + self._first_position)
        types = torch.zeros_like(input[:1]) if context.token_types is None else context.token_types
        stream = self.embedding_norm.unrounded(stream + self.token_type(types))
        return dropout(stream, self._embedding_dropout, "embedding", context.dropout)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]. Raises ModelError without the head."""
        if self.head_dense is None or self.head_norm is None or self.head_bias is None:
            raise ModelError("this encoder has no head for masked tokens", fix="train it: task=masked_lm")
        hidden = self._activation(self.head_dense(hidden))
        logits = self.kernels.linear(self.head_norm(hidden), self.head_weight)
        return logits + self.head_bias.to(logits.dtype)
