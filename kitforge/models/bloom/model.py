"""BLOOM: GPT-2's block with ALiBi in place of learned positions and a norm after the embedding (BigScience, 2022)."""

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.positions import ALiBi
from kitforge.models.transformer_config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig(GPTConfig):
    """Sizes and options of a BLOOM."""

    family: ClassVar[str] = "bloom"

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        block = self.gpt_block("gelu_tanh", (self.attention_dropout, self.residual_dropout))
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=ALiBi(),
            tie_embeddings=self.tie_embeddings,
            embedding_norm=True,
        )
