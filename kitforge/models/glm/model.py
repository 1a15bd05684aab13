"""GLM-4 and ChatGLM2/3: LLaMA's block with interleaved rotation of half of each head and biased queries, keys and
values; GLM-4-0414 normalizes each branch on its way out too (GLM Team, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.rotary import RopeScaling, RotaryConfig
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class GLMConfig:
    """Sizes and options of a GLM."""

    family: ClassVar[str] = "glm"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp_dim: int
    head_dim: int | None = None  # None: dim / num_heads
    max_length: int = 8192
    norm_eps: float = 1.5625e-07
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rotary_fraction: float = 0.5
    qkv_bias: bool = True
    sandwich_norms: bool = False  # GLM-4-0414
    tie_embeddings: bool = False
    attention_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and (self.head_dim is not None or self.dim % self.num_heads == 0)
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")
        check(0 < self.rotary_fraction <= 1, "model.rotary_fraction", self.rotary_fraction, "above 0, at most 1")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        head_dim = self.head_dim or self.dim // self.num_heads
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_dim,
            qkv_bias=self.qkv_bias,
            dropout=self.attention_dropout,
            interleaved_rotary=True,
        )
        block = BlockConfig(
            attention=attention,
            mlp=MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind="swiglu"),
            norm="rms",
            norm_eps=self.norm_eps,
            sandwich=self.sandwich_norms,
        )
        rotary = RotaryConfig(
            dim=int(head_dim * self.rotary_fraction),
            theta=self.rope_theta,
            max_length=self.max_length,
            interleaved=True,
            scaling=self.rope_scaling,
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=rotary,
            tie_embeddings=self.tie_embeddings,
        )
