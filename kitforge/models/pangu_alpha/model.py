"""PanGu-alpha: GPT-2's block with another GELU, and a query layer on top (Zeng et al., 2021)."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.positions import Learned
from kitforge.models.transformer_config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PanguAlphaConfig(GPTConfig):
    """Sizes and options of a PanGu-alpha."""

    family: ClassVar[str] = "pangu_alpha"
    num_layers: int  # the query layer included
    max_length: int = 1024
    mlp_dim: int | None = None  # None: 4 * dim
    activation: Literal["quick_gelu", "gelu", "gelu_tanh"] = "quick_gelu"
    embedding_dropout: float = 0.0

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        block = self.gpt_block(self.activation, (self.attention_dropout, self.residual_dropout), self.mlp_dim)
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(*(block,) * (self.num_layers - 1), replace(block, query_positions=self.max_length)),
            positions=Learned(),
            tie_embeddings=self.tie_embeddings,
            embedding_dropout=self.embedding_dropout,
        )
