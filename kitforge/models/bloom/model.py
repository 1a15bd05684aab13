"""BLOOM: GPT-2's block with ALiBi in place of learned positions and a norm after the embedding (BigScience, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.positions import ALiBi
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig:
    """Sizes and options of a BLOOM."""

    family: ClassVar[str] = "bloom"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    max_length: int = 2048
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and self.dim % self.num_heads == 0
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            qkv_bias=True,
            out_bias=True,
            dropout=self.attention_dropout,
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=4 * self.dim, kind="gelu_tanh", bias=True)
        block = BlockConfig(
            attention=attention, mlp=mlp, norm="layer", norm_eps=self.norm_eps, dropout=self.residual_dropout
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=ALiBi(),
            tie_embeddings=self.tie_embeddings,
            embedding_norm=True,
        )
