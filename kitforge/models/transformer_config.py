"""The options that families of transformers share; a family's own dataclass adds to them."""

from collections.abc import Iterable
from dataclasses import dataclass

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS, DecoderConfig
from kitforge.core.nn.mlp import MLPConfig, MLPKind
from kitforge.core.nn.rotary import RopeScaling, RotaryConfig
from kitforge.foundation.config import check, check_counts
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Options of every transformer."""

    dim: int
    num_layers: int
    num_heads: int
    norm_eps: float = 1e-5
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_counts("model", {"num_layers": self.num_layers}, MAX_LAYERS)
        check(self._heads_fit(), "model.num_heads", self.num_heads, f"a divisor of model.dim={self.dim}")

    def gpt_block(
        self,
        kind: MLPKind,
        dropout: tuple[float, float],
        mlp_dim: int | None = None,
        *,
        scale: float | None = None,
        qkv_bias: bool = True,
    ) -> BlockConfig:
        """A layer with LayerNorm, biases, and as many heads of keys as of queries, as GPT-2, BLOOM, BERT and ViT have
        it. `dropout` is that of the attention weights and that of each branch's output; `mlp_dim` None: 4 * dim;
        `scale` is that of `AttentionConfig`."""
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.dim // self.num_heads,
            qkv_bias=qkv_bias,
            out_bias=True,
            scale=scale,
            dropout=dropout[0],
        )
        mlp = MLPConfig(dim=self.dim, hidden_dim=4 * self.dim if mlp_dim is None else mlp_dim, kind=kind, bias=True)
        return BlockConfig(attention=attention, mlp=mlp, norm="layer", norm_eps=self.norm_eps, dropout=dropout[1])

    def _heads_fit(self) -> bool:
        return self.num_heads > 0 and self.dim % self.num_heads == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModelConfig(TransformerConfig):
    """Options of every transformer over tokens."""

    vocab_size: int
    max_length: int = 2048
    tie_embeddings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(LanguageModelConfig):
    """Options of a decoder of `gpt_block`s."""

    tie_embeddings: bool = True
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryDecoderConfig(LanguageModelConfig):
    """Options of a decoder with rotary positions, whose heads may share keys and need not fill the width."""

    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: dim / num_heads
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_dropout: float = 0.0

    def _heads_fit(self) -> bool:
        return self.num_heads > 0 and (self.head_dim is not None or self.dim % self.num_heads == 0)

    @property
    def head_width(self) -> int:
        """The width of a head."""
        return self.dim // self.num_heads if self.head_dim is None else self.head_dim

    def attention(self) -> AttentionConfig:
        """The attention of a layer, for a family to replace what it has otherwise."""
        return AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=self.head_width,
            dropout=self.attention_dropout,
        )

    def rotary_decoder(self, blocks: Iterable[BlockConfig]) -> DecoderConfig:
        """The decoder of these blocks, for a family to replace what it has otherwise."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=tuple(blocks),
            positions=self.rotary(),
            tie_embeddings=self.tie_embeddings,
        )

    def rotary(self) -> RotaryConfig:
        """The rotary positions of the whole head."""
        return RotaryConfig(
            dim=self.head_width, theta=self.rope_theta, max_length=self.max_length, scaling=self.rope_scaling
        )
