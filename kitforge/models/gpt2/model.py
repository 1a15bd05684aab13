"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere (Radford et al., 2019)."""

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.block import BlockConfig
from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.positions import Learned
from kitforge.models.transformer_config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(GPTConfig):
    """Sizes and options of a GPT-2."""

    family: ClassVar[str] = "gpt2"
    max_length: int = 1024
    mlp_dim: int | None = None  # None: 4 * dim
    embedding_dropout: float = 0.0
    scale_by_layer: bool = False  # divide attention scores by the layer's number, counted from 1

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=tuple(self._block(layer) for layer in range(self.num_layers)),
            positions=Learned(),
            tie_embeddings=self.tie_embeddings,
            embedding_dropout=self.embedding_dropout,
        )

    def _block(self, layer: int) -> BlockConfig:
        scale = (self.dim // self.num_heads) ** -0.5 / (layer + 1) if self.scale_by_layer else None
        return self.gpt_block("gelu_tanh", (self.attention_dropout, self.residual_dropout), self.mlp_dim, scale=scale)
