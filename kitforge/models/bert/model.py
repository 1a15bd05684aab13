"""BERT: an encoder with learned positions, token types, and norms behind each branch (Devlin et al., 2019).

RoBERTa (Liu et al., 2019) is the same network: one token type, and positions that begin behind that of padding.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from kitforge.core.nn.decoder import DecoderConfig
from kitforge.core.nn.positions import Learned
from kitforge.foundation.config import check, check_counts
from kitforge.models.transformer_config import GPTConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig(GPTConfig):
    """Sizes and options of a BERT."""

    family: ClassVar[str] = "bert"
    max_length: int = 512
    mlp_dim: int | None = None  # None: 4 * dim
    activation: Literal["gelu", "gelu_tanh", "relu"] = "gelu"
    norm_eps: float = 1e-12
    embedding_dropout: float = 0.0
    num_token_types: int = 2
    first_position: int = 0  # the row of the table of positions for the first token; 2 in RoBERTa
    lm_head: bool = True  # a head for masked tokens
    names: Literal["bert", "roberta"] = "bert"  # of the tensors in Hugging Face folders

    def __post_init__(self) -> None:
        GPTConfig.__post_init__(self)
        check_counts("model", {"num_token_types": self.num_token_types})
        check(self.first_position >= 0, "model.first_position", self.first_position, "0 or more")
        check(self.tie_embeddings, "model.tie_embeddings", False, "true, as the head of an encoder is")

    @property
    def head_activation(self) -> str:
        """Of the head for masked tokens."""
        return self.activation if self.names == "bert" else "gelu"

    def decoder(self) -> DecoderConfig:
        """The stack of these options, layer by layer."""
        block = dataclasses.replace(
            self.gpt_block(self.activation, (self.attention_dropout, self.residual_dropout), self.mlp_dim),
            post_norm=True,
        )
        return DecoderConfig(
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            blocks=(block,) * self.num_layers,
            positions=Learned(),
            tie_embeddings=True,
            embedding_norm=True,
            embedding_dropout=self.embedding_dropout,
        )
