"""A decoder that reads a text and gives one number a token: a reward model, or a critic. B rows, T tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM, Trainable
from kitforge.core.nn.context import Context
from kitforge.foundation import seed as seeds
from kitforge.foundation.errors import ModelError


def complete_head(tensors: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """A head by the names of `ValueHeadModel.head`. What another program left out is 0, and the deviation 1. Raises
    ModelError for a head of another size."""
    shapes = {"score.weight": (1, dim), "score.bias": (1,), "score.mean": (), "score.deviation": ()}
    found = {}
    for name, shape in shapes.items():
        own = torch.ones(shape) if name == "score.deviation" else torch.zeros(shape)
        given = tensors.get(name, own)
        given = given.reshape(shape) if given.numel() == own.numel() == 1 else given
        if given.shape != own.shape:
            raise ModelError("the head is of another size", got=list(given.shape), expected=list(shape))
        found[name] = given
    return found


def normalized_head(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head whose plain scores are the normalised ones of another."""
    deviation = head["score.deviation"]
    bias = (head["score.bias"] - head["score.mean"]) / deviation
    return complete_head(
        {"score.weight": head["score.weight"] / deviation, "score.bias": bias}, head["score.weight"].shape[1]
    )


def init_head(dim: int, seed: int) -> dict[str, Tensor]:
    """The head that a scalar model begins with, by the names of `ValueHeadModel.head`."""
    noise = torch.randn((1, dim), generator=seeds.generator(seed, "init", "score.weight"))
    return {"score.weight": noise / (dim + 1) ** 0.5}


@final
class ValueHeadModel(nn.Module):
    """`score(hidden)`, not bounded by anything, for tokens [B, T].

    `mean` and `deviation` are those of the scores over the texts it was trained on; `normalised` takes them out. They
    travel with the weights, so that whoever uses the scores means the same by them.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        network = cast(CausalLM, backbone)
        self.backbone = backbone
        # The scores of such tokens at the end of a text do not count, as in transformers; None: all do.
        self.pad_id: int | None = None
        if isinstance(backbone, Trainable):
            backbone.freeze_head()
        like = network.head_weight
        self.score = nn.Linear(network.geometry.dim, 1, device=like.device, dtype=like.dtype)
        # Buffers of one number each; double, as they are met by numbers in any format.
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64, device=like.device))
        self.register_buffer("deviation", torch.ones((), dtype=torch.float64, device=like.device))

    @torch.no_grad()
    def reset_head(self, seed: int) -> None:
        """Weights with deviation 1 / sqrt(dim + 1) and no bias (Stiennon et al., 2020)."""
        first = init_head(self.score.weight.shape[1], seed)
        self.score.weight.copy_(first["score.weight"])
        self.score.bias.zero_()

    @torch.no_grad()
    def copy_head(self, other: ValueHeadModel) -> None:
        """Score as the other does, over the same backbone."""
        self.score.load_state_dict(other.score.state_dict())
        self.mean.copy_(other.mean)
        self.deviation.copy_(other.deviation)

    def head(self) -> dict[str, Tensor]:
        """All but the backbone, by the names under which it lies beside an adapter."""
        tensors = {"weight": self.score.weight, "bias": self.score.bias, "mean": self.mean, "deviation": self.deviation}
        return {f"score.{name}": each for name, each in tensors.items()}

    @torch.no_grad()
    def load_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `head` gave. What another program left out is 0, and the deviation 1. Raises ModelError for a
        head of another size."""
        whole = complete_head(tensors, self.score.weight.shape[1])
        for name, own in self.head().items():
            own.copy_(whole[name])

    @torch.no_grad()
    def init_from_reward_model(self, other: ValueHeadModel) -> None:
        """Take the head of another model, so that this one's plain scores are the other's normalised ones."""
        head = normalized_head(other.head())
        self.score.weight.copy_(head["score.weight"])
        self.score.bias.copy_(head["score.bias"])

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Scores [B, T], one after each token."""
        hidden = cast(CausalLM, self.backbone).hidden(tokens, context)
        return self._scores(hidden)

    def scores_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Scores [B] of rows [B, T] after the tokens at places [B], or the last ones before that are not `pad_id`."""
        if self.pad_id is not None:
            order = torch.arange(tokens.shape[1], device=tokens.device)
            counts = (tokens != self.pad_id) & (order <= positions.unsqueeze(-1))
            positions = (order * counts).argmax(-1)
        hidden = cast(CausalLM, self.backbone).hidden(tokens)
        return self._scores(hidden[torch.arange(len(positions), device=hidden.device), positions])

    def _scores(self, hidden: Tensor) -> Tensor:
        # The sum over one number is that number, and no view, whose changes in place would escape a sharded module.
        scores: Tensor = self.score(hidden.to(self.score.weight.dtype)).sum(-1)
        return scores

    def normalized(self, scores: Tensor) -> Tensor:
        """Scores in units of what the model gave the texts it was trained on."""
        return ((scores - self.mean) / self.deviation).to(scores.dtype)
