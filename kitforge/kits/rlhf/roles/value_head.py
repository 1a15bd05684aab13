"""Value head models: the reward model, the critic, and the actor-critic pair. B rows, T tokens."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.causal_lm import CausalLM, Geometry, Trainable
from kitforge.core.nn.context import Context
from kitforge.core.nn.score_head import HEAD, ScoreModel, initial_head
from kitforge.foundation.errors import ModelError


def complete_head(tensors: Mapping[str, Tensor], dim: int) -> dict[str, Tensor]:
    """A value head by the names of `ValueHeadModel.head`; missing tensors are 0, a missing deviation is 1. Raises
    ModelError for wrong shapes."""
    shapes = {"score.weight": (1, dim), "score.bias": (1,), "score.mean": (), "score.deviation": ()}
    found = {}
    for name, shape in shapes.items():
        own = torch.ones(shape) if name == "score.deviation" else torch.zeros(shape)
        given = tensors.get(name, own)
        given = given.reshape(shape) if given.numel() == own.numel() == 1 else given
        if given.shape != own.shape:
            raise ModelError("the value head has the wrong shape", got=list(given.shape), expected=list(shape))
        found[name] = given
    return found


def normalized_head(head: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A value head whose scores are the normalized scores of another: that of a critic, of a reward model."""
    deviation = head["score.deviation"]
    bias = (head["score.bias"] - head["score.mean"]) / deviation
    return complete_head(
        {"score.weight": head["score.weight"] / deviation, "score.bias": bias}, head["score.weight"].shape[1]
    )


def init_head(dim: int, seed: int) -> dict[str, Tensor]:
    """An initial value head, by the names of `ValueHeadModel.head`."""
    return {HEAD: initial_head(1, dim, seed, 1.0) / (dim + 1) ** 0.5}


class ValueHeadModel(ScoreModel):
    """A decoder with a value head: `score(hidden)`, unbounded, for tokens [B, T].

    `mean` and `deviation` are those of the scores of the training texts; `normalized` applies them. They are stored
    with the weights.
    """

    fsdp_root = "scores_at"
    mean: Tensor
    deviation: Tensor

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__(backbone, 1, has_bias=True)
        # Trailing tokens of this id are ignored, as in transformers; None: none are.
        self.pad_id: int | None = None
        if isinstance(backbone, Trainable):
            backbone.freeze_head()
        # Scalar buffers in double, as scores may have any dtype.
        device = self.score.weight.device
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64, device=device))
        self.register_buffer("deviation", torch.ones((), dtype=torch.float64, device=device))

    def reset_head(self, seed: int) -> None:
        """Weights with deviation 1 / sqrt(dim + 1) and no bias (Stiennon et al., 2020)."""
        self.load_head(init_head(self.score.weight.shape[1], seed))

    def head(self) -> dict[str, Tensor]:
        """The value head by the tensor names of an adapter folder."""
        tensors = {"weight": self.score.weight, "bias": self.score.bias, "mean": self.mean, "deviation": self.deviation}
        return {f"score.{name}": each for name, each in tensors.items()}

    @torch.no_grad()
    def load_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Inverse of `head`, see `complete_head`."""
        whole = complete_head(tensors, self.score.weight.shape[1])
        for name, own in self.head().items():
            own.copy_(whole[name])

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """Scores [B, T], one after each token."""
        hidden = self.language_model.hidden(tokens, context)
        # A sum over one number instead of a view, whose in-place changes would escape a sharded module.
        scores: Tensor = self.score(hidden.to(self.score.weight.dtype)).sum(-1)
        return scores

    def scores_at(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Scores [B] of rows [B, T] at `positions` [B], or at the last tokens before them that are not `pad_id`."""
        if self.pad_id is not None:
            order = torch.arange(tokens.shape[1], device=tokens.device)
            counts = (tokens != self.pad_id) & (order <= positions.unsqueeze(-1))
            positions = (order * counts).argmax(-1)
        return self.pooled_scores(tokens, None, positions).sum(-1)

    def normalized(self, scores: Tensor) -> Tensor:
        """Scores with mean 0 and standard deviation 1 over the training texts."""
        return ((scores - self.mean) / self.deviation).to(scores.dtype)


class ActorCritic(nn.Module):
    """Policy and critic, trained by one optimizer. As a `CausalLM` it is the policy."""

    def __init__(self, policy: nn.Module, critic: ValueHeadModel) -> None:
        super().__init__()
        self.policy = policy
        self.critic = critic

    @property
    def geometry(self) -> Geometry:
        """The policy's sizes."""
        return self._network.geometry

    @property
    def kernels(self) -> Kernels:
        """The policy's kernels."""
        return self._network.kernels

    @property
    def head_weight(self) -> Tensor:
        """The matrix of the policy's head."""
        return self._network.head_weight

    def hidden(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The policy's last output [B, T, dim]."""
        return self._network.hidden(tokens, context)

    def head(self, hidden: Tensor) -> Tensor:
        """The policy's logits [..., vocab]."""
        return self._network.head(hidden)

    def forward(self, tokens: Tensor, context: Context | None = None) -> Tensor:
        """The policy's logits [B, T, vocab]."""
        return self._network(tokens, context)

    @property
    def _network(self) -> CausalLM:
        return cast(CausalLM, self.policy)


def policy_of(model: nn.Module) -> nn.Module:
    """The policy of an actor-critic model, or the model itself."""
    return model.policy if isinstance(model, ActorCritic) else model


def critic_of(model: nn.Module) -> ValueHeadModel | None:
    """The critic of an actor-critic model, or None."""
    return model.critic if isinstance(model, ActorCritic) else None
