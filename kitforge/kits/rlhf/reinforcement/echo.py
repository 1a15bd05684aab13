"""Echo: cross-entropy on what tools and environments answer, beside the policy loss, as in prime-rl."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.shared_prefix import hidden_at
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import IGNORED, MicroBatch, Sums


def echo_targets(rows: MicroBatch) -> Tensor:
    """The answers in rows of a rollout batch as targets [B, T], IGNORED elsewhere: the tokens between those of the
    policy, without rows that are not trained on."""
    is_own = rows["targets"] != IGNORED
    is_within = (is_own.cumsum(-1) > 0) & (is_own.flip(-1).cumsum(-1).flip(-1) > 0)
    is_echoed = is_within & ~is_own & rows["keep_mask"].unsqueeze(-1)
    return torch.where(is_echoed, rows["tokens"].roll(-1, -1), IGNORED)


def echo_count(step: Sequence[MicroBatch]) -> Sums:
    """The tokens of the answers in rollouts."""
    return {"echo_loss": torch.stack([(echo_targets(each) != IGNORED).sum() for each in step]).sum()}


def echo_loss(policy: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies at temperature 1, and of the same forward pass the hidden states at the policy's
    tokens [N, dim]."""
    network, is_own = cast(CausalLM, policy), micro_batch["targets"] != IGNORED
    targets = echo_targets(micro_batch)
    is_read = is_own | (targets != IGNORED)
    hidden = hidden_at(network, micro_batch["tokens"], is_read)
    targets, is_own = (copy_to(each[is_read], hidden.device) for each in (targets, is_own))
    return network.kernels.linear_cross_entropy(hidden, network.head_weight, targets), hidden[is_own]
