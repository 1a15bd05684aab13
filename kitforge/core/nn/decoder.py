"""The decoder that the families share: embeddings, blocks, a norm and a head.

A family configures it (`models/<family>/model.py`). Written unsharded; layers read local sizes from their weights.
B batch, T length.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from kitforge.core.kernels.cpu_engine.custom_ops import is_traced
from kitforge.core.kernels.dispatch import REFERENCE, Kernels
from kitforge.core.kernels.quantized_linear.reference import Blocks
from kitforge.core.nn.block import DROPOUT, BlockConfig
from kitforge.core.nn.causal_lm import Geometry
from kitforge.core.nn.context import Context, dropout
from kitforge.core.nn.init import unfilled_embedding
from kitforge.core.nn.linear import Linear
from kitforge.core.nn.norm import Norm
from kitforge.core.nn.positions import ALiBi, Learned, PositionEncoding, Positions, alibi_slopes
from kitforge.core.nn.rotary import RotaryAngles, RotaryConfig, document_lengths
from kitforge.core.nn.stack import Stack
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype

# A configuration makes a dataclass for each block, so absurd counts are refused first.
MAX_LAYERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A whole decoder, layer by layer."""

    vocab_size: int
    max_length: int
    blocks: tuple[BlockConfig, ...]
    positions: Positions
    tie_embeddings: bool
    # A second rotation, for the layers whose attention has `rotary=1`.
    local_positions: RotaryConfig | None = None
    embedding_norm: bool = False  # normalize the embedding, as the blocks do
    embedding_scale: float | None = None  # multiplies the embedding, not the head
    embedding_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_counts("model", {"vocab_size": self.vocab_size, "max_length": self.max_length})
        check(0 <= self.embedding_dropout < 1, "model.embedding_dropout", self.embedding_dropout, DROPOUT)


class FamilyConfig(Protocol):
    """A family's own dataclass of options."""

    @property
    def family(self) -> str:
        """The family's name in the catalog."""

    @property
    def num_layers(self) -> int:
        """Blocks of the decoder."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def max_length(self) -> int:
        """The longest text."""

    @property
    def dtype(self) -> WeightDtype:
        """The dtype of its published weights, and of an export by default."""


class DecoderFamily(FamilyConfig, Protocol):
    """The options of a family of decoders."""

    def decoder(self) -> DecoderConfig:
        """The decoder of these options."""


class Decoder(Stack):
    """A causal language model: tokens [B, T] -> logits [B, T, vocab]."""

    def __init__(self, config: DecoderFamily, kernels: Kernels = REFERENCE) -> None:
        super().__init__()
        shape = config.decoder()
        block = shape.blocks[0]
        dim = block.attention.dim
        positions = shape.positions
        rotations = (positions, shape.local_positions)
        angles = [RotaryAngles(each) for each in rotations if isinstance(each, RotaryConfig)]
        self.config = config
        self.kernels = kernels
        self.geometry = Geometry.of(
            shape.blocks,
            shape.vocab_size,
            shape.max_length,
            depends_on_length=any(each.depends_on_length for each in angles),
            num_experts=max(each.num_experts for each in shape.blocks),
        )
        self.embedding = unfilled_embedding(shape.vocab_size, dim)
        self.embedding_norm = Norm(block.norm, dim, block.norm_eps, kernels) if shape.embedding_norm else None
        self.position = unfilled_embedding(shape.max_length, dim) if isinstance(positions, Learned) else None
        self.add_blocks(shape.blocks, kernels)
        self._is_tied = shape.tie_embeddings
        self.output = None if shape.tie_embeddings else nn.Parameter(torch.empty(shape.vocab_size, dim))
        self.stored_head: Linear | None = None  # a quantized head, in place of `output` or of a tied embedding
        self._angles = angles
        self._has_slopes = isinstance(positions, ALiBi)
        self._has_query_layer = shape.blocks[-1].query_positions is not None
        self._embedding_dropout = shape.embedding_dropout
        self._embedding_scale = shape.embedding_scale

    @property
    def head_weight(self) -> Tensor:
        """The matrix [vocab, dim] of the head; the embedding's if they are tied. Of a quantized head, and of a stage
        without one, only device and dtype of the network, an empty matrix."""
        embedding: Tensor | None = getattr(self.embedding, "weight", None)
        head = embedding if self._is_tied else self.output
        if head is not None and self.stored_head is None:
            return head
        if embedding is not None:
            return embedding[:0]
        return self.absent_head()

    @property
    def head_name(self) -> str:
        """The parameter that is `head_weight`."""
        return "embedding.weight" if self._is_tied else "output"

    @property
    def has_fixed_angles(self) -> bool:
        """Whether it has rotary positions, with angles that depend on nothing but the position."""
        return bool(self._angles) and not self.geometry.depends_on_length

    @property
    def is_whole(self) -> bool:
        """Whether it has all of its modules, and no axis of parallelism and no adapter has wrapped them."""
        # The tensor axis replaces `forward` of modules; torch's FSDP makes a class of its own; a stage has None in the
        # place of a module, where an option that is off has no module.
        wraps = ("forward" in each.__dict__ or None in each._modules.values() for each in self.modules())
        return type(self) is Decoder and not any(wraps)

    def embed(self, input: Tensor, context: Context) -> Tensor:
        """The stream [B, T, dim] of tokens [B, T] into the first block."""
        stream = self.embedding(input)
        if self._embedding_scale is not None:
            stream = stream * stream.new_full((), self._embedding_scale)  # rounded to the stream's dtype, as published
        if self.embedding_norm is not None:
            stream = self.embedding_norm.unrounded(stream)
        if self.position is not None:
            stream = stream + self.position(self._positions(input, context))
        return dropout(stream, self._embedding_dropout, "embedding", context.dropout)

    def encode_positions(self, input: Tensor, context: Context) -> PositionEncoding:
        """The encoding of the positions of tokens [B, T]."""
        if not self._angles:
            indices = self._positions(input, context).expand(input.shape) if self._has_query_layer else None
            return PositionEncoding(slopes=self.slopes(input.device), indices=indices)
        positions, lengths = self._positions(input, context), context.lengths
        if lengths is None and context.documents is not None and self.geometry.depends_on_length:
            lengths = document_lengths(positions, context.documents)
        return PositionEncoding(rotary=tuple(each(positions, lengths) for each in self._angles))

    def slopes(self, device: torch.device) -> Tensor | None:
        """The slopes of ALiBi [heads] on the device; None with other positions."""
        return alibi_slopes(self.geometry.num_heads, device) if self._has_slopes else None

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden [..., dim]."""
        if self.stored_head is not None:
            return self.stored_head(hidden)  # type: ignore[no-any-return]
        return self.kernels.linear(hidden, self.head_weight)

    def keep_head(self, blocks: Blocks) -> None:
        """Replace the head by a quantized one; a tied embedding stays as it is."""
        vocab, dim = blocks.shape
        self.output = None
        with torch.device("meta"):
            self.stored_head = Linear(dim, vocab, bias=False, kernels=self.kernels)
        self.stored_head.keep(blocks)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Logits [B, T, vocab]."""
        return self.head(self.hidden(tokens, context))

    def freeze_head(self) -> None:
        """Do not train the head, for models that read hidden states only. A head tied to the embedding stays."""
        if self.output is not None:
            # An optimizer would keep two states of it.
            self.output.requires_grad_(False)

    def _positions(self, tokens: Tensor, context: Context) -> Tensor:
        """The positions of tokens; those of a learned table must lie in it, rotary ones have no end."""
        length, positions = tokens.shape[1], context.positions
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        # On an accelerator, reading the values would synchronize, and a traced program cannot; there the embedding
        # refuses indices out of range.
        elif self.position is None or is_traced((positions,)):
            return positions
        elif positions.device.type == "cpu" and positions.numel():
            length = int(positions.max()) + 1
        else:
            return positions
        expected = f"at most the model's max_length={self.geometry.max_length}"
        check(self.position is None or length <= self.geometry.max_length, "data.sequence_length", length, expected)
        return positions
