"""A network with a linear head that scores its rows or its tokens: classifiers, reward models, critics.

B rows, T tokens, C scores.
"""

from abc import ABC
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, dropout
from kitforge.foundation import seed as seeds

BACKBONE = "backbone."  # prefix of the network's parameters
HEAD, HEAD_BIAS = "score.weight", "score.bias"
POOLER, POOLER_BIAS = "pooler.weight", "pooler.bias"


class ScoreModel(nn.Module, ABC):
    """A network and a head [C, dim]; with a pooler [dim, dim] and tanh in front of the head it scores the first token,
    as BERT does (Devlin et al., 2019)."""

    fsdp_root: str  # the method besides `forward` that computes with the weights

    def __init__(
        self, backbone: nn.Module, num_scores: int, *, has_bias: bool, pooler_dropout: float | None = None
    ) -> None:
        super().__init__()
        self.backbone = backbone
        like, dim = self.language_model.head_weight, self.language_model.geometry.dim
        self.score = nn.Linear(dim, num_scores, bias=has_bias, device=like.device, dtype=like.dtype)
        # With a rate of dropout behind it; None: no pooler.
        self.pooler = None if pooler_dropout is None else nn.Linear(dim, dim, device=like.device, dtype=like.dtype)
        self._rate = pooler_dropout or 0.0

    @property
    def language_model(self) -> CausalLM:
        """The backbone."""
        return cast(CausalLM, self.backbone)

    def pooled_scores(self, tokens: Tensor, context: Context | None, ends: Tensor | None = None) -> Tensor:
        """Scores [B, C] of rows [B, T] at the positions `ends` [B], or with a pooler at the first token; without `ends`
        those of every token [B T, C], one row after another: no view, which FSDP cannot hook."""
        hidden = self.language_model.hidden(tokens, context)
        if self.pooler is not None:
            first = torch.tanh(self.pooler(hidden[:, 0].to(self.pooler.weight.dtype)))
            first = dropout(first, self._rate, "pooler", None if context is None else context.dropout)
            return cast(Tensor, self.score(first))
        pooled = hidden.flatten(0, 1) if ends is None else hidden[torch.arange(len(ends), device=hidden.device), ends]
        scores: Tensor = self.score(pooled.to(self.score.weight.dtype))
        return scores


def initial_head(num_scores: int, dim: int, seed: int, deviation: float = 0.02, name: str = HEAD) -> Tensor:
    """The first weights [C, dim] of a head."""
    return torch.randn((num_scores, dim), generator=seeds.generator(seed, "init", name)) * deviation
