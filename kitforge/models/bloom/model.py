"""BLOOM: GPT-2's block with ALiBi in place of learned positions and a norm after the embedding (BigScience, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.gpt_block import check_sizes, gpt_block
from kitforge.core.nn.positions import ALiBi
from kitforge.foundation.dtype import WeightDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BloomConfig:
    """Sizes and options of a BLOOM."""

    family: ClassVar[str] = "bloom"
    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    max_length: int = 2048
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    dtype: WeightDtype = "float32"  # of exported weights unless another is asked for; training keeps fp32

    def __post_init__(self) -> None:
        check_sizes(self)

    def decoder(self) -> DecoderConfig:
        """The decoder of these options, layer by layer."""
        block = gpt_block(self, "gelu_tanh")
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=ALiBi(),
            tie_embeddings=self.tie_embeddings,
            embedding_norm=True,
        )
