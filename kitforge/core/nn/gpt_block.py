"""The layer of GPT-2, BLOOM, PanGu-alpha and ViT: LayerNorm, biases, and as many heads of keys as of queries."""

from typing import Protocol

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.mlp import MLPConfig, MLPKind


class GPTSizes(Protocol):
    """What a family's options say of its layers."""

    @property
    def dim(self) -> int:
        """The width of the stream."""

    @property
    def num_heads(self) -> int:
        """Heads of attention."""

    @property
    def norm_eps(self) -> float:
        """Of all norms."""

    @property
    def attention_dropout(self) -> float:
        """Of the attention weights."""

    @property
    def residual_dropout(self) -> float:
        """Of each branch's output."""


def gpt_block(
    config: GPTSizes, kind: MLPKind, mlp_dim: int | None = None, *, scale: float | None = None, qkv_bias: bool = True
) -> BlockConfig:
    """The layer; `mlp_dim` None: 4 * dim. `scale` is that of `AttentionConfig`."""
    attention = AttentionConfig(
        dim=config.dim,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_dim=config.dim // config.num_heads,
        qkv_bias=qkv_bias,
        out_bias=True,
        scale=scale,
        dropout=config.attention_dropout,
    )
    mlp = MLPConfig(dim=config.dim, hidden_dim=mlp_dim or 4 * config.dim, kind=kind, bias=True)
    return BlockConfig(
        attention=attention, mlp=mlp, norm="layer", norm_eps=config.norm_eps, dropout=config.residual_dropout
    )
