"""An encoder and a decoder with cross-attention, as T5: a language model of a target, given a source.

B batch, S source length, T target length.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from kitforge.core.kernels.autograd.recomputation import Recompute
from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.causal_lm import Geometry
from kitforge.core.nn.context import AttentionSpec, Context, DocumentAttend, EncoderInput, causal_mask, dropout
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.init import unfilled_embedding
from kitforge.core.nn.positions import PositionEncoding, Relative, RelativeBias
from kitforge.core.nn.stack import Stack
from kitforge.foundation.config import check_counts
from kitforge.foundation.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """Both stacks, layer by layer."""

    vocab_size: int
    max_length: int  # of a source, and of a target
    encoder: tuple[BlockConfig, ...]
    decoder: tuple[BlockConfig, ...]
    positions: Relative
    tie_embeddings: bool
    scale_output: bool = False  # multiply the output of the decoder by dim ** -0.5
    dropout: float = 0.0  # of the embeddings, and of the output of each stack

    def __post_init__(self) -> None:
        check_counts("model", {"vocab_size": self.vocab_size, "max_length": self.max_length})
        check_counts("model", {"num_layers": len(self.encoder), "num_decoder_layers": len(self.decoder)})


class EncoderDecoderFamily(FamilyConfig, Protocol):
    """The options of a family of encoder-decoders."""

    def stacks(self) -> EncoderDecoderConfig:
        """Both stacks of these options."""


class DecoderCache:
    """Keys and values of the target so far, of rows in lockstep. Is an `Attend`."""

    def __init__(self, max_length: int) -> None:
        self.length = 0  # positions that all layers hold
        self._max_length = max_length
        self._slabs: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Append the keys and values of new tokens [B, heads, T, D] and attend; see `Attend`."""
        stop = self.length + key.shape[2]
        if spec.layer not in self._slabs:
            shape = (*key.shape[:2], self._max_length, key.shape[3])
            self._slabs[spec.layer] = key.new_zeros(shape), value.new_zeros(shape)
        slabs = self._slabs[spec.layer]
        for slab, new in zip(slabs, (key, value), strict=True):
            slab[:, :, self.length : stop] = new
        keys, values = (slab[:, :, :stop].to(query.dtype) for slab in slabs)
        positions = torch.arange(stop, device=query.device)

        def mask(window: int | None) -> Tensor | None:
            return None if window is None else causal_mask(positions[self.length :], positions, window)

        # Several new tokens are those of an empty cache.
        return spec.attend(query, keys, values, mask=mask, causal=key.shape[2] > 1)

    def select(self, rows: Tensor) -> None:
        """Keep these rows [N], in this order; a row may come more than once."""
        self._slabs = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self._slabs.items()}


class RelativeStack(Stack):
    """Blocks with a relative bias that they share, over embeddings [B, T, dim], as the network embeds for both stacks.
    `name` tells its dropout from that of the other stack."""

    def __init__(
        self, blocks: tuple[BlockConfig, ...], shape: EncoderDecoderConfig, name: str, kernels: Kernels
    ) -> None:
        super().__init__()
        first = blocks[0]
        self.relative = RelativeBias(shape.positions, first.attention.num_heads, is_causal=first.cross is not None)
        self.add_blocks(blocks, kernels, name)
        self._rate, self._name = shape.dropout, name

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, T, dim] into the first block."""
        return dropout(input, self._rate, f"{self._name}embedding", context.dropout)

    def encode_positions(self, input: Tensor, context: Context) -> PositionEncoding:
        """The bias of positions that follow `context.past`."""
        positions = torch.arange(context.past + input.shape[1], device=input.device)
        return PositionEncoding(bias=self.relative(positions[context.past :], positions))

    def leave(self, stream: Tensor, context: Context) -> Tensor:
        """The normalized output [B, T, dim] of the last block's stream, with dropout."""
        return dropout(super().leave(stream, context), self._rate, f"{self._name}output", context.dropout)


class EncoderDecoder(nn.Module):
    """Tokens [B, T] of a target and `context.source` -> logits [B, T, vocab]."""

    def __init__(self, config: EncoderDecoderFamily, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        shape = config.stacks()
        attention = shape.decoder[0].attention
        self.config = config
        self.kernels = kernels
        self.geometry = Geometry.of(shape.decoder, shape.vocab_size, shape.max_length)
        self.embedding = unfilled_embedding(shape.vocab_size, attention.dim)
        self.encoder = RelativeStack(shape.encoder, shape, "encoder.", kernels)
        self.decoder = RelativeStack(shape.decoder, shape, "", kernels)
        self.output = None if shape.tie_embeddings else nn.Parameter(torch.empty(shape.vocab_size, attention.dim))
        self._output_scale = attention.dim**-0.5 if shape.scale_output else 1.0

    @property
    def recompute(self) -> Recompute:
        """Activation checkpointing: what of a block the backward pass computes again."""
        return self.decoder.recompute

    @recompute.setter
    def recompute(self, what: Recompute) -> None:
        self.encoder.recompute = self.decoder.recompute = what

    @property
    def head_weight(self) -> Tensor:
        """The matrix [vocab, dim] of the head; the embedding's if they are tied."""
        return self.embedding.weight if self.output is None else self.output

    @property
    def head_name(self) -> str:
        """The parameter that is `head_weight`."""
        return "embedding.weight" if self.output is None else "output"

    def encode(self, source: EncoderInput, context: Context) -> Tensor:
        """The output [B, S, dim] of the encoder."""
        own = Context(attend=DocumentAttend(source.documents), dropout=context.dropout)
        return self.encoder.hidden(self.embedding(source.tokens), own)

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Normalized output [B, T, dim] of the decoder for tokens [B, T], which follow those in a `DecoderCache` or
        `context.past` others. The source is encoded by the first call, unless the keys of all layers are given. Raises
        ModelError without one."""
        if context is None or context.source is None:
            raise ModelError("an encoder-decoder needs a source", fix="pass Context(source=EncoderInput(tokens=...))")
        source, cache = context.source, context.attend
        if source.states is None and not source.keys:
            source.states = self.encode(source, context)
        if isinstance(cache, DecoderCache):
            context = replace(context, past=cache.length)
        hidden = self.decoder.hidden(self.embedding(tokens), context)
        if isinstance(cache, DecoderCache):
            cache.length += tokens.shape[1]
        return hidden if self._output_scale == 1.0 else hidden * self._output_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]."""
        return self.kernels.linear(hidden, self.head_weight)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, T, vocab]."""
        return self.head(self.hidden(tokens, context))

    def compile_blocks(self) -> None:
        """Compile each block with torch.compile (level O2), over the same weights."""
        self.encoder.compile_blocks()
        self.decoder.compile_blocks()

    def freeze_head(self) -> None:
        """Do not train the head, for models that read hidden states only. A head tied to the embedding stays."""
        if self.output is not None:
            self.output.requires_grad_(False)
