"""Qwen3 MoE: Qwen3's decoder with a mixture of experts in all blocks or some (Qwen Team, 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.moe import ExpertsConfig, MoEConfig
from kitforge.core.nn.rotary import RopeScaling, RotaryConfig
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoEConfig:
    """Sizes and options of a Qwen3 MoE."""

    family: ClassVar[str] = "qwen3_moe"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    expert_dim: int  # the width of an expert
    mlp_dim: int  # of the layers without experts
    experts: ExpertsConfig
    dense_layers: tuple[int, ...] = ()  # the layers without experts
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: dim / num_heads
    max_length: int = 2048
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and (self.head_dim is not None or self.dim % self.num_heads == 0)
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")
        has_experts = not set(range(self.num_layers)) <= set(self.dense_layers)
        check(has_experts, "model.dense_layers", self.dense_layers, "at least one layer with experts")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        head_dim = self.head_dim or self.dim // self.num_heads
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=head_dim,
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            qk_norm_eps=self.norm_eps,
            window=self.sliding_window,
            dropout=self.attention_dropout,
        )
        sparse = MoEConfig(dim=self.dim, hidden_dim=self.expert_dim, experts=self.experts)
        dense = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind="swiglu")
        mlps = (dense if layer in self.dense_layers else sparse for layer in range(self.num_layers))
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=tuple(BlockConfig(attention=attention, mlp=mlp, norm="rms", norm_eps=self.norm_eps) for mlp in mlps),
            positions=RotaryConfig(
                dim=head_dim, theta=self.rope_theta, max_length=self.max_length, scaling=self.rope_scaling
            ),
            tie_embeddings=self.tie_embeddings,
        )
