"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.gpt_block import check_sizes, gpt_block
from kitforge.core.nn.positions import Learned
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes and options of a GPT-2."""

    family: ClassVar[str] = "gpt2"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    max_length: int = 1024
    mlp_dim: int | None = None  # None: 4 * dim
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    scale_by_layer: bool = False  # divide attention scores by the layer's number, counted from 1
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_sizes(self)

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=tuple(self._block(layer) for layer in range(self.num_layers)),
            positions=Learned(),
            tie_embeddings=self.tie_embeddings,
            embedding_dropout=self.embedding_dropout,
        )

    def _block(self, layer: int) -> BlockConfig:
        scale = (self.dim // self.num_heads) ** -0.5 / (layer + 1) if self.scale_by_layer else None
        return gpt_block(self, "gelu_tanh", self.mlp_dim, scale=scale)
