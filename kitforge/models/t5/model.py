"""T5: an encoder-decoder with a learned relative bias and unscaled attention (Raffel et al., 2020).

Version 1.1, Flan-T5 and mT5 have a gated MLP, and a head of their own whose input is not scaled.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from kitforge.core.nn.attention import AttentionConfig
from kitforge.core.nn.block import DROPOUT, BlockConfig
from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.core.nn.encoder_decoder import EncoderDecoderConfig
from kitforge.core.nn.mlp import MLPConfig
from kitforge.core.nn.positions import Relative
from kitforge.foundation.config import check, check_counts
from kitforge.models.transformer_config import LanguageModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config(LanguageModelConfig):
    """Sizes and options of a T5."""

    family: ClassVar[str] = "t5"
    mlp_dim: int
    num_decoder_layers: int | None = None  # None: num_layers
    head_dim: int = 64  # num_heads * head_dim may differ from dim
    max_length: int = 512  # of a source, and of a target; the bias has no end
    activation: Literal["relu", "geglu"] = "relu"  # geglu: version 1.1
    norm_eps: float = 1e-6
    num_buckets: int = 32
    max_distance: int = 128
    tie_embeddings: bool = True
    scale_output: bool | None = None  # multiply the decoder's output by dim ** -0.5; None: with tied embeddings
    dropout: float = 0.0  # of embeddings, attention weights, branches and the outputs of both stacks
    decoder_start_id: int | None = None  # the token that targets begin with; None: the tokenizer's padding

    def __post_init__(self) -> None:
        LanguageModelConfig.__post_init__(self)
        start = self.decoder_start_id
        expected = f"a token below vocab_size={self.vocab_size}, or null"
        check(start is None or 0 <= start < self.vocab_size, "model.decoder_start_id", start, expected)
        check(0 <= self.dropout < 1, "model.dropout", self.dropout, DROPOUT)
        check_counts("model", {"num_decoder_layers": self.num_decoder_layers}, MAX_LAYERS)

    def _heads_fit(self) -> bool:
        return self.num_heads > 0

    @property
    def scales_output(self) -> bool:
        """Whether the input of the head is scaled."""
        return self.tie_embeddings if self.scale_output is None else self.scale_output

    @property
    def deviations(self) -> dict[str, float]:
        """Standard deviations of the initial weights, by the end of a name: what keeps unscaled attention and a scaled
        head at unit variance (Raffel et al., 2020). With a head that is not scaled, those of other families, from which
        AdamW learns faster (docs/log.md)."""
        if not self.scales_output:
            return {}
        width, inner = self.dim**-0.5, (self.num_heads * self.head_dim) ** -0.5
        return {
            "embedding.weight": 1.0,
            "relative.weight": width,
            "query.weight": width * self.head_dim**-0.5,
            "key.weight": width,
            "value.weight": width,
            "out.weight": inner,
            "gate.weight": width,
            "up.weight": width,
            "down.weight": self.mlp_dim**-0.5,
        }

    def stacks(self) -> EncoderDecoderConfig:
        """Both stacks of these options."""
        return EncoderDecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            encoder=(self._block(is_decoder=False),) * self.num_layers,
            decoder=(self._block(is_decoder=True),) * (self.num_decoder_layers or self.num_layers),
            positions=Relative(num_buckets=self.num_buckets, max_distance=self.max_distance),
            tie_embeddings=self.tie_embeddings,
            scale_output=self.scales_output,
            dropout=self.dropout,
        )

    def _block(self, *, is_decoder: bool) -> BlockConfig:
        attention = AttentionConfig(
            dim=self.dim,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_dim=self.head_dim,
            scale=1.0,
            dropout=self.dropout,
        )
        return BlockConfig(
            attention=attention,
            mlp=MLPConfig(dim=self.dim, hidden_dim=self.mlp_dim, kind=self.activation),
            norm="rms",
            norm_eps=self.norm_eps,
            dropout=self.dropout,
            cross=attention if is_decoder else None,
        )
