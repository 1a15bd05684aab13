"""Mistakes that released projects made, as small functions beside ours, and the property that tells them apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.advantages import (
    discounted_returns,
    group_advantages,
    last_token_mask,
    masked_whiten,
    token_rewards,
)
from kitforge.kits.rlhf.algorithms.kl import KlController, KlControllerOptions, kl_loss
from kitforge.kits.rlhf.algorithms.losses import ClipOptions, aggregate, loss_denominator, policy_loss
from kitforge.kits.rlhf.algorithms.preference_losses import kto_loss, mismatched_completions
from kitforge.kits.rlhf.reinforcement.rollout_batch import to_token_grid
from tests.kits.rlhf.algorithms.sequences import MASK, numbers

SCORES = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
PENALTIES = torch.where(MASK, 0.1, 0.0).double()
LOUD = torch.where(MASK, 0.1, 1.0).double()  # padding that is not zero, as models leave it


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One mistake."""

    project: str  # with its version
    link: str
    property: Callable[[Callable[..., Any]], bool]
    ours: Callable[..., Any]
    theirs: Callable[..., Any]


def earns_score_less_penalties(rewards: Callable[..., Tensor]) -> bool:
    return torch.allclose(rewards(SCORES, PENALTIES, MASK).sum(-1), SCORES - PENALTIES.sum(-1), atol=1e-10)


def bonus(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    return torch.where(last_token_mask(mask), scores.unsqueeze(-1), 0.0) + penalties


def score_everywhere(scores: Tensor, penalties: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, scores.unsqueeze(-1) - penalties, 0.0)


def ranks_agree(whitening: Callable[..., Tensor]) -> bool:
    """Two ranks with different statistics give the signs of one."""
    values = torch.where(MASK, numbers(0), 0.0) + torch.tensor([[1.0], [1.0], [-1.0], [-1.0]], dtype=torch.float64)
    return bool((whitening(values, MASK).sign() == masked_whiten(values, MASK).sign())[MASK].all())


def each_rank_alone(values: Tensor, mask: Tensor) -> Tensor:
    return torch.cat(
        [masked_whiten(own, own_mask) for own, own_mask in zip(values.split(2), mask.split(2), strict=True)]
    )


def padding_is_silent(whitening: Callable[..., Tensor]) -> bool:
    values = torch.where(MASK, numbers(1), 0.0)
    louder = torch.where(MASK, values, 100.0)
    return torch.equal(whitening(values, MASK)[MASK], whitening(louder, MASK)[MASK])


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()


def entropy_is_not_negative(mean: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Where padded log-probabilities are set to 1."""
    surprisal = torch.where(MASK, 0.2, -1.0)
    return float(mean(surprisal, MASK)) >= 0


def token_mean(values: Tensor, mask: Tensor) -> Tensor:
    return aggregate(values, mask, "token-mean", loss_denominator(mask, "token-mean", 8))


def micro_batches_change_nothing(loss: Callable[..., float]) -> bool:
    values = numbers(2)
    return abs(loss(values, MASK, 1) - loss(values, MASK, 4)) < 1e-10


def shared_denominator(values: Tensor, mask: Tensor, size: int) -> float:
    parts = zip(values.split(size), mask.split(size), strict=True)
    return sum(float(aggregate(part, kept, "token-mean", mask.sum())) for part, kept in parts)


def mean_of_means(values: Tensor, mask: Tensor, size: int) -> float:
    parts = list(zip(values.split(size), mask.split(size), strict=True))
    return sum(float(aggregate(part, kept, "token-mean", kept.sum())) for part, kept in parts) / len(parts)


def sum_of_means(values: Tensor, mask: Tensor, size: int) -> float:
    parts = zip(values.split(size), mask.split(size), strict=True)
    return sum(float(aggregate(part, kept, "token-mean", kept.sum())) for part, kept in parts)


def pulls_towards_reference(loss: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """The mean gradient over all outcomes is that of KL(policy || reference)."""
    everything = torch.ones(7, dtype=torch.bool)
    logits, reference = numbers(3, everything).requires_grad_(), numbers(4, everything).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (wanted,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)
    found = torch.autograd.grad((log_probs.exp().detach() * loss(log_probs, reference)).sum(), logits)[0]
    return torch.allclose(found, wanted, atol=1e-10)


def plain_k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    return log_probs - reference


def plain_k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    return (reference - log_probs).expm1() + log_probs - reference


def a_lone_response_is_refused(baseline: Callable[[Tensor], Tensor]) -> bool:
    try:
        baseline(torch.ones(3, 1))
    except ConfigError:
        return True
    return False


def groups_stay_apart(baseline: Callable[[Tensor], Tensor]) -> bool:
    scores = torch.tensor([[1.0, 2.0], [30.0, 40.0]], dtype=torch.float64)
    return torch.allclose(baseline(scores)[0], baseline(scores[:1])[0])


def masked_returns(penalties: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """What stands behind the end earns nothing."""
    rewards = penalties(LOUD, MASK)
    return torch.equal(rewards[~MASK], torch.zeros_like(rewards[~MASK]))


def settles_on_sequences(feed: Callable[[float, int], float]) -> bool:
    """The coefficient comes to rest where a sequence of 50 tokens is 6 nats away."""
    held = KlController(KlControllerOptions(kind="adaptive", coef=0.1, target=6.0, horizon=500))
    for _ in range(2000):
        held.update(feed(0.9 / max(held.coef, 1e-6), 50), 50)
    return abs(0.9 / max(held.coef, 1e-6) - 6.0) < 0.1


def first_ratio_is_one(log_probs: Callable[[Tensor], Tensor]) -> bool:
    """Tokens that were drawn at a temperature of 0.7."""
    logits = numbers(5, torch.ones(20, 9, dtype=torch.bool))
    drawn = (logits / 0.7).log_softmax(-1)[:, 0]
    _, is_clipped = policy_loss(log_probs(logits)[:, 0], drawn, torch.ones(20), ClipOptions())
    return not bool(is_clipped.any())


def ratios_of_one_policy_are_one(kept: Callable[[Tensor], Tensor]) -> bool:
    """Log-probabilities that were kept from when an answer was written, against the same found again."""
    now = numbers(9, torch.ones(40, dtype=torch.bool)) - 8.0
    return bool(((now - kept(now)).exp() - 1).abs().max() < 1e-5)


def no_answer_meets_its_own_prompt(pairing: Callable[[list[int]], list[int]]) -> bool:
    return all(own != other for number in (2, 3, 4, 5) for own, other in enumerate(pairing(list(range(number)))))


def kto_over_micro_batches(baseline: Callable[..., Tensor]) -> bool:
    """The loss of eight answers is that of two micro-batches of four."""
    everyone = torch.ones(8, dtype=torch.bool)
    ratios, crossed, good = numbers(6, everyone), numbers(7, everyone).abs(), numbers(8, everyone) > 0
    crossed[4:] *= 3
    whole = kto_loss(ratios, good, crossed.mean(), 0.5).sum()
    parts = [slice(0, 4), slice(4, 8)]
    split = sum(kto_loss(ratios[part], good[part], baseline(crossed, part), 0.5).sum() for part in parts)
    return torch.allclose(whole, torch.as_tensor(split), atol=1e-10)


MUSEUM = {
    "an answer beside its own prompt in KTO's baseline": Exhibit(
        project="huggingface/trl 0.9, hiyouga/LlamaFactory before its #7509",
        link="https://github.com/huggingface/trl/issues/1911",
        property=no_answer_meets_its_own_prompt,
        ours=mismatched_completions,
        theirs=lambda answers: answers[::-1],
    ),
    "KTO's baseline from each micro-batch alone": Exhibit(
        project="huggingface/trl 1.12",
        link="https://github.com/huggingface/trl/blob/v1.12.0/trl/trainer/kto_trainer.py",
        property=kto_over_micro_batches,
        ours=lambda crossed, part: crossed.mean(),
        theirs=lambda crossed, part: crossed[part].mean(),
    ),
    "a bonus for leaving the reference": Exhibit(
        project="mindspore-lab/mindrlhf 0.3",
        link="https://github.com/mindspore-lab/mindrlhf/blob/master/mindrlhf/trainer/ppo_trainer.py",
        property=earns_score_less_penalties,
        ours=token_rewards,
        theirs=bonus,
    ),
    "the score on every token": Exhibit(
        project="hpcaitech/ColossalAI, ColossalChat",
        link="https://github.com/hpcaitech/ColossalAI/blob/main/applications/ColossalChat/coati/models/utils.py",
        property=earns_score_less_penalties,
        ours=token_rewards,
        theirs=score_everywhere,
    ),
    "whitening rank by rank": Exhibit(
        project="huggingface/trl 1.12",
        link="https://github.com/huggingface/trl/blob/v1.12.0/trl/experimental/ppo/ppo_trainer.py",
        property=ranks_agree,
        ours=masked_whiten,
        theirs=each_rank_alone,
    ),
    "whitening over padding": Exhibit(
        project="CarperAI/trlx 0.7",
        link="https://github.com/CarperAI/trlx/blob/main/trlx/utils/modeling.py",
        property=padding_is_silent,
        ours=masked_whiten,
        theirs=unmasked,
    ),
    "a negative entropy": Exhibit(
        project="huggingface/trl 1.12",
        link="https://github.com/huggingface/trl/issues/2022",
        property=entropy_is_not_negative,
        ours=token_mean,
        theirs=lambda values, mask: values.mean(),
    ),
    "a mean of means over micro-batches": Exhibit(
        project="huggingface/trl 1.12",
        link="https://github.com/huggingface/trl/blob/v1.12.0/trl/experimental/ppo/ppo_trainer.py",
        property=micro_batches_change_nothing,
        ours=shared_denominator,
        theirs=mean_of_means,
    ),
    "losses times the number of micro-batches": Exhibit(
        project="volcengine/verl",
        link="https://github.com/volcengine/verl/issues/4711",
        property=micro_batches_change_nothing,
        ours=shared_denominator,
        theirs=sum_of_means,
    ),
    "k1 as a loss, which regularises nothing": Exhibit(
        project="several",
        link="http://joschu.net/blog/kl-approx.html",
        property=pulls_towards_reference,
        ours=lambda now, reference: kl_loss(now, reference, "k1"),
        theirs=plain_k1,
    ),
    "k3 as a loss, which pulls the wrong way": Exhibit(
        project="huggingface/trl 1.12, OpenRLHF/OpenRLHF, THUDM/slime",
        link="https://github.com/NVIDIA-NeMo/RL/pull/2506",
        property=pulls_towards_reference,
        ours=lambda now, reference: kl_loss(now, reference, "k3"),
        theirs=plain_k3,
    ),
    "a group of one that learns nothing in silence": Exhibit(
        project="OpenRLHF/OpenRLHF",
        link="https://github.com/OpenRLHF/OpenRLHF/issues/1250",
        property=a_lone_response_is_refused,
        ours=lambda scores: group_advantages(scores, "dr_grpo"),
        theirs=lambda scores: scores - scores.mean(-1, keepdim=True),
    ),
    "a baseline over the wrong axis": Exhibit(
        project="OpenRLHF/OpenRLHF",
        link="https://github.com/OpenRLHF/OpenRLHF/issues/1250",
        property=groups_stay_apart,
        ours=lambda scores: group_advantages(scores, "dr_grpo"),
        theirs=lambda scores: scores - scores.mean(0, keepdim=True),
    ),
    "penalties behind the end": Exhibit(
        project="THUDM/slime",
        link="https://github.com/THUDM/slime/issues/1372",
        property=masked_returns,
        ours=lambda penalties, mask: discounted_returns(token_rewards(SCORES, penalties, mask), mask, 1.0),
        theirs=lambda penalties, mask: (-penalties).flip(-1).cumsum(-1).flip(-1),
    ),
    "a target in nats a sequence fed with nats a token": Exhibit(
        project="volcengine/verl",
        link="https://github.com/volcengine/verl/blob/main/verl/trainer/ppo/core_algos.py",
        property=settles_on_sequences,
        ours=lambda nats, tokens: nats,
        theirs=lambda nats, tokens: nats / tokens,
    ),
    "log-probabilities kept in half precision": Exhibit(
        project="mindspore-lab/mindrlhf 0.3",
        link="https://github.com/mindspore-lab/mindrlhf/blob/master/mindrlhf/utils/configs.py",
        property=ratios_of_one_policy_are_one,
        ours=lambda log_probs: to_token_grid([log_probs.tolist()], torch.ones(1, len(log_probs), dtype=torch.bool))[0],
        theirs=lambda log_probs: log_probs.half().double(),
    ),
    "log-probabilities at another temperature than the sampler's": Exhibit(
        project="huggingface/trl, THUDM/slime",
        link="https://github.com/huggingface/trl/issues/4159",
        property=first_ratio_is_one,
        ours=lambda logits: (logits / 0.7).log_softmax(-1),
        theirs=lambda logits: logits.log_softmax(-1),
    ),
}
