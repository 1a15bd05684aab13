"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere (Radford et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.positions import Learned
from kitforge.foundation.config import check, check_counts
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
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and self.dim % self.num_heads == 0
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")

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
        head_dim = self.dim // self.num_heads
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=head_dim,
            qkv_bias=True,
            out_bias=True,
            scale=head_dim**-0.5 / (layer + 1) if self.scale_by_layer else None,
            dropout=self.attention_dropout,
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim or 4 * self.dim, kind="gelu_tanh", bias=True)
        return BlockConfig(
            attention=attention, mlp=mlp, norm="layer", norm_eps=self.norm_eps, dropout=self.residual_dropout
        )
