"""Mixtral: Mistral's decoder with a mixture of SwiGLU experts in every block (Jiang et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.moe import ExpertsConfig, MoEConfig
from kitforge.core.nn.rotary import RopeScaling, RotaryConfig
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig:
    """Sizes and options of a Mixtral."""

    family: ClassVar[str] = "mixtral"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int  # of an expert
    experts: ExpertsConfig
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: dim / num_heads
    max_length: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 1e6
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and (self.head_dim is not None or self.dim % self.num_heads == 0)
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options; its blocks are alike."""
        head_dim = self.head_dim or self.dim // self.num_heads
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=head_dim,
            qkv_bias=False,
            out_bias=False,
            window=self.sliding_window,
            dropout=self.attention_dropout,
        )
        moe = MoEConfig(dim=self.dim, hidden_dim=self.mlp_dim, experts=self.experts)
        block = BlockConfig(attention=attention, mlp=moe, norm="rms", norm_eps=self.norm_eps)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=RotaryConfig(
                dim=head_dim, theta=self.rope_theta, max_length=self.max_length, scaling=self.rope_scaling
            ),
            tie_embeddings=self.tie_embeddings,
        )
