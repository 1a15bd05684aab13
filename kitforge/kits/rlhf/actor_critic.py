"""A policy and, beside it, what expects its rewards: two networks that one optimizer trains."""

from __future__ import annotations

from typing import cast, final

from torch import Tensor, nn

from kitforge.core.kernels.dispatch import Kernels
from kitforge.core.nn.causal_lm import CausalLM, Geometry
from kitforge.core.nn.context import Context
from kitforge.kits.rlhf.reward_model import ValueHeadModel


@final
class ActorCritic(nn.Module):
    """To everyone else it is the policy: a `CausalLM` that can be generated from."""

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
    """The language model alone."""
    return model.policy if isinstance(model, ActorCritic) else model


def critic_of(model: nn.Module) -> ValueHeadModel | None:
    """What expects rewards, if anything does."""
    return model.critic if isinstance(model, ActorCritic) else None
