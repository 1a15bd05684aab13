"""LLaMA: rotary positions, RMSNorm, SwiGLU, grouped keys (Touvron et al., 2023; the LLaMA 3 release).

Mistral adds a sliding window; Qwen2 a bias on queries, keys and values; Qwen3 norms on query and key heads; SmolLM3
layers without rotary positions. Gemma 3 has GeGLU, norms on both ends of each branch, and local layers of their own
`rope_theta` (Gemma Team, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.rotary import RopeScaling, RotaryConfig
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and options of a LLaMA or a close relative."""

    family: ClassVar[str] = "llama"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: dim / num_heads
    max_length: int = 2048
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
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
    attention_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        divides = self.num_heads > 0 and (self.head_dim is not None or self.dim % self.num_heads == 0)
        check(divides, "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")
        check_counts("model", {"query_pre_attn_scalar": self.query_pre_attn_scalar})

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        head_dim = self.head_dim or self.dim // self.num_heads
        local = self.local_rope_theta
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=tuple(self._block(layer, head_dim) for layer in range(self.num_layers)),
            positions=RotaryConfig(
                dim=head_dim, theta=self.rope_theta, max_length=self.max_length, scaling=self.rope_scaling
            ),
            local_positions=(
                None if local is None else RotaryConfig(dim=head_dim, theta=local, max_length=self.max_length)
            ),
            tie_embeddings=self.tie_embeddings,
            embedding_scale=self.dim**0.5 if self.scale_embedding else None,
        )

    def _block(self, layer: int, head_dim: int) -> BlockConfig:
        has_window = self.window_layers is None or layer in self.window_layers
        rotary = 1 if has_window and self.local_rope_theta is not None else 0
        scalar = self.query_pre_attn_scalar
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            scale=None if scalar is None or scalar == head_dim else scalar**-0.5,
            window=self.sliding_window if has_window else None,
            dropout=self.attention_dropout,
            rotary=None if layer in self.no_rope_layers else rotary,
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind=self.mlp_kind, bias=self.mlp_bias)
        return BlockConfig(
            attention=attention, mlp=mlp, norm="rms", norm_eps=self.norm_eps, sandwich=self.sandwich_norms
        )
