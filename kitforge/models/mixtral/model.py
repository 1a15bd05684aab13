"""Mixtral: Mistral's decoder with a mixture of SwiGLU experts in every block (Jiang et al., 2024)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.moe import ExpertsConfig, MoEConfig
from kitforge.models.transformer_config import RotaryDecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(RotaryDecoderConfig):
    """Sizes and options of a Mixtral."""

    family: ClassVar[str] = "mixtral"
    mlp_dim: int  # of an expert
    experts: ExpertsConfig
    rope_theta: float = 1e6
    sliding_window: int | None = None

    def decoder(self) -> DecoderConfig:
        """The decoder of these options; its blocks are alike."""
        attention = replace(self.attention(), window=self.sliding_window)
        moe = MoEConfig(dim=self.dim, hidden_dim=self.mlp_dim, experts=self.experts)
        block = BlockConfig(attention=attention, mlp=moe, norm="rms", norm_eps=self.norm_eps)
        return self.rotary_decoder([block] * self.num_layers)
