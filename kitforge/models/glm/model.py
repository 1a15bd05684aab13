"""GLM-4 and ChatGLM2/3: LLaMA's block with interleaved rotation of half of each head and biased queries, keys and
values; GLM-4-0414 normalizes each branch on its way out too (GLM Team, 2024)."""

from dataclasses import dataclass, replace
from typing import ClassVar

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.foundation.config import check
from kitforge.models.transformer_config import RotaryDecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GLMConfig(RotaryDecoderConfig):
    """Sizes and options of a GLM."""

    family: ClassVar[str] = "glm"
    num_kv_heads: int
    mlp_dim: int
    max_length: int = 8192
    norm_eps: float = 1.5625e-07
    rotary_fraction: float = 0.5
    qkv_bias: bool = True
    sandwich_norms: bool = False  # GLM-4-0414

    def __post_init__(self) -> None:
        RotaryDecoderConfig.__post_init__(self)
        check(0 < self.rotary_fraction <= 1, "model.rotary_fraction", self.rotary_fraction, "above 0, at most 1")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        attention = replace(self.attention(), qkv_bias=self.qkv_bias, interleaved_rotary=True)
        block = BlockConfig(
            attention=attention,
            mlp=MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind="swiglu"),
            norm="rms",
            norm_eps=self.norm_eps,
            sandwich=self.sandwich_norms,
        )
        rotary = replace(self.rotary(), dim=int(self.head_width * self.rotary_fraction), interleaved=True)
        return replace(self.rotary_decoder([block] * self.num_layers), positions=rotary)
