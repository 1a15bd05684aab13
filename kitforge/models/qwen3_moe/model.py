"""Qwen3 MoE: Qwen3's decoder with a mixture of experts in all blocks or some (Qwen Team, 2025)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.moe import ExpertsConfig, MoEConfig
from kitforge.foundation.config import check, check_counts
from kitforge.models.transformer_config import RotaryDecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoEConfig(RotaryDecoderConfig):
    """Sizes and options of a Qwen3 MoE."""

    family: ClassVar[str] = "qwen3_moe"
    expert_dim: int  # the width of an expert
    mlp_dim: int  # of the layers without experts
    experts: ExpertsConfig
    dense_layers: tuple[int, ...] = ()  # the layers without experts
    norm_eps: float = 1e-6
    attention_bias: bool = False
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        RotaryDecoderConfig.__post_init__(self)
        check_counts("model", {"expert_dim": self.expert_dim})
        has_experts = not set(range(self.num_layers)) <= set(self.dense_layers)
        check(has_experts, "model.dense_layers", self.dense_layers, "at least one layer with experts")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        attention = replace(
            self.attention(),
            qkv_bias=self.attention_bias,
            out_bias=self.attention_bias,
            qk_norm_eps=self.norm_eps,
            window=self.sliding_window,
        )
        sparse = MoEConfig(dim=self.dim, hidden_dim=self.expert_dim, experts=self.experts)
        dense = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind="swiglu")
        mlps = (dense if layer in self.dense_layers else sparse for layer in range(self.num_layers))
        return self.rotary_decoder(
            BlockConfig(attention=attention, mlp=mlp, norm="rms", norm_eps=self.norm_eps) for mlp in mlps
        )
