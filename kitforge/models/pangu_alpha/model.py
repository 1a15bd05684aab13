"""PanGu-alpha: GPT-2's block with another GELU, and a query layer on top (Zeng et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.positions import Learned
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PanguAlphaConfig:
    """Sizes and options of a PanGu-alpha."""

    family: ClassVar[str] = "pangu_alpha"
    vocab_size: int
    dim: int
    num_layers: int  # the query layer included
    num_heads: int
    max_length: int = 1024
    mlp_dim: int | None = None  # None: 4 * dim
    activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    embedding_dropout: float = 0.0
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
        mlp = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim or 4 * self.dim, kind=self.activation, bias=True)
        block = BlockConfig(
            attention=attention, mlp=mlp, norm="layer", norm_eps=self.norm_eps, dropout=self.residual_dropout
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(*(block,) * (self.num_layers - 1), replace(block, query_positions=self.max_length)),
            positions=Learned(),
            tie_embeddings=self.tie_embeddings,
            embedding_dropout=self.embedding_dropout,
        )
