"""LLaMA: rotary positions, RMSNorm, SwiGLU, grouped keys (Touvron et al., 2023; the LLaMA 3 release).

Mistral adds a sliding window; Qwen2 a bias on queries, keys and values; Qwen3 norms on query and key heads; SmolLM3
layers without rotary positions. Gemma 3 has GeGLU, norms on both ends of each branch, and local layers of their own
`rope_theta` (Gemma Team, 2025).
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.foundation.config import check, check_counts
from kitforge.models.transformer_config import RotaryDecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(RotaryDecoderConfig):
    """Sizes and options of a LLaMA or a close relative."""

    family: ClassVar[str] = "llama"
    mlp_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[int, ...] | None = None  # the layers that use the window; None: all
    local_rope_theta: float | None = None  # of the layers that use the window, without scaling; None: as the others
    no_rope_layers: tuple[int, ...] = ()  # the layers without rotary positions
    mlp_kind: Literal["swiglu", "geglu"] = "swiglu"
    sandwich_norms: bool = False  # normalize the output of each branch too
    scale_embedding: bool = False  # multiply the embedding by the root of dim
    query_pre_attn_scalar: int | None = None  # scores are divided by its root; None: by that of head_dim

    def __post_init__(self) -> None:
        RotaryDecoderConfig.__post_init__(self)
        check_counts("model", {"query_pre_attn_scalar": self.query_pre_attn_scalar})
        theta = self.local_rope_theta
        check(theta is None or theta > 1, "model.local_rope_theta", theta, "above 1, or null")

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        local = self.local_rope_theta
        return replace(
            self.rotary_decoder(self._block(layer) for layer in range(self.num_layers)),
            local_positions=None if local is None else replace(self.rotary(), theta=local, scaling=None),
            embedding_scale=self.dim**0.5 if self.scale_embedding else None,
        )

    def _block(self, layer: int) -> BlockConfig:
        has_window = self.window_layers is None or layer in self.window_layers
        rotary = 1 if has_window and self.local_rope_theta is not None else 0
        scalar = self.query_pre_attn_scalar
        attention = replace(
            self.attention(),
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            scale=None if scalar is None or scalar == self.head_width else scalar**-0.5,
            window=self.sliding_window if has_window else None,
            rotary=None if layer in self.no_rope_layers else rotary,
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind=self.mlp_kind, bias=self.mlp_bias)
        return BlockConfig(
            attention=attention, mlp=mlp, norm="rms", norm_eps=self.norm_eps, sandwich=self.sandwich_norms
        )
