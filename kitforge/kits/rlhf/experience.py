"""From scored answers to what moves each of their tokens. Pure: no network is asked. S answers, T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.data.packing import IGNORED
from kitforge.foundation.errors import TrainingError
from kitforge.kits.rlhf.algorithms.advantages import discounted_returns, gae_advantages, length_adaptive_lambda
from kitforge.kits.rlhf.algorithms.group_advantages import group_advantages, has_reward_variance
from kitforge.kits.rlhf.algorithms.importance_sampling import importance_weights
from kitforge.kits.rlhf.algorithms.kl import kl_estimate
from kitforge.kits.rlhf.algorithms.losses import explained_variance
from kitforge.kits.rlhf.algorithms.token_rewards import (
    last_token_mask,
    missing_eos_scores,
    overlong_penalty,
    token_rewards,
)
from kitforge.kits.rlhf.algorithms.whitening import masked_whiten
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.rollout_batch import Rollout, RolloutBatch, environment_metrics, pad_rollouts, to_token_grid
from kitforge.kits.rlhf.rollout_metrics import completion_metrics, mismatch_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSelection:
    """Which of the answers drawn for a round are trained on."""

    indices: list[int]  # of the answers of `prompts_per_step` groups, in the order in which they were drawn
    has_signal: list[bool]  # of each of these answers: whether the rewards of its group differ
    is_full: bool  # whether all of them do
    num_prompts: int  # prompts up to the last one that was needed; the next round begins behind it
    fraction_zero_std: float  # of all groups drawn


def select_groups(rollouts: Sequence[Rollout], options: RLOptions) -> GroupSelection:
    """Dynamic sampling (DAPO; Yu et al., 2025): the first `prompts_per_step` groups whose rewards differ, before any
    penalty; where there are fewer, the first of the others fill the round up, and count for nothing."""
    rl = options.rl
    rewards = torch.tensor([each.reward for each in rollouts], dtype=torch.float64).view(-1, rl.num_generations)
    signal: list[bool] = has_reward_variance(rewards).flatten().tolist()
    with_signal = [group for group, differs in enumerate(signal) if differs]
    without = [group for group, differs in enumerate(signal) if not differs]
    is_full = len(with_signal) >= rl.prompts_per_rollout
    # Also for a round that drops nothing, whose groups all take part.
    groups = sorted((with_signal + without)[: rl.prompts_per_rollout])
    return GroupSelection(
        indices=[group * rl.num_generations + sample for group in groups for sample in range(rl.num_generations)],
        has_signal=[signal[group] for group in groups for _ in range(rl.num_generations)],
        is_full=is_full,
        num_prompts=groups[-1] + 1 if is_full else len(signal),
        fraction_zero_std=len(without) / len(signal),
    )


def compute_experience(rollouts: Sequence[Rollout], options: RLOptions, kl_coef: float, pad_id: int) -> RolloutBatch:
    """The answers drawn for a round, those to one prompt next to one another, as what is trained on; see `select` for
    rounds that drop groups. `coefficient` is the cost of a nat. Raises TrainingError where the policy has diverged."""
    rl = options.rl
    _check_not_empty(rollouts)
    chosen = select_groups(rollouts, options) if rl.filter_zero_variance_groups else None
    trajectories = rollouts if chosen is None else [rollouts[index] for index in chosen.indices]
    batch = pad_rollouts(trajectories, pad_id)
    mask = batch["targets"] != IGNORED
    drawn = to_token_grid([each.logprobs for each in trajectories], mask)
    old_logprobs = (
        to_token_grid([each.old_logprobs for each in trajectories], mask) if trajectories[0].old_logprobs else drawn
    )
    weights = importance_weights(old_logprobs, drawn, mask, options.importance_sampling)
    ref_logprobs = (
        to_token_grid([each.ref_logprobs for each in trajectories], mask)
        if trajectories[0].ref_logprobs
        else old_logprobs
    )
    values = (
        to_token_grid([each.values for each in trajectories], mask)
        if trajectories[0].values
        else torch.zeros_like(old_logprobs)
    )
    scores = shaped_scores(trajectories, options, mask)
    kl = torch.where(mask, kl_estimate(old_logprobs, ref_logprobs, options.kl.estimator), 0.0)
    penalties = kl_coef * kl if options.kl.apply_to == "reward" else torch.zeros_like(kl)
    is_kept = torch.tensor([each.completion.is_finished or not rl.mask_truncated_completions for each in trajectories])
    if chosen is not None:
        is_kept = is_kept & torch.tensor(chosen.has_signal)
    if rl.advantage in ("gae", "reinforce"):
        rewards = token_rewards(scores, penalties, mask)
        if rl.whiten_rewards:
            rewards = masked_whiten(rewards, mask, shift_mean=False)
        advantages, targets = _token_advantages(rewards, values, mask, options)
    else:
        advantages = _group_advantages(scores, penalties, mask, options)
        targets = torch.zeros_like(advantages)
    if rl.whiten_advantages:
        advantages = masked_whiten(advantages, mask & is_kept.unsqueeze(-1))
    return RolloutBatch(
        tokens=batch["tokens"],
        targets=batch["targets"],
        old_logprobs=old_logprobs,
        importance_weights=torch.ones_like(old_logprobs) if weights is None else weights,
        ref_logprobs=ref_logprobs,
        values=values,
        advantages=advantages,
        returns=targets,
        keep_mask=is_kept,
        metrics=_rollout_metrics(rollouts, options)
        | environment_metrics(rollouts)
        | (
            mismatch_metrics(old_logprobs, drawn, mask, weights, options.importance_sampling)
            if trajectories[0].old_logprobs
            else {}
        )
        | ({"kl": float(kl.sum(-1).mean())} if trajectories[0].ref_logprobs else {})
        | ({"explained_variance": float(explained_variance(values, targets, mask))} if trajectories[0].values else {}),
    )


def _check_not_empty(trajectories: Sequence[Rollout]) -> None:
    """Raise TrainingError for answers without a token, which nothing but a policy that has diverged gives."""
    if not all(each.logprobs for each in trajectories):
        raise TrainingError(
            "the policy no longer answers: what it makes of a prompt is not a number",
            got=f"{sum(not each.logprobs for each in trajectories)} of {len(trajectories)} answers without a token",
            expected="finite logits",
            fix="go on from a checkpoint before that, with a smaller optimizer.learning_rate",
        )


def shaped_scores(trajectories: Sequence[Rollout], options: RLOptions, mask: Tensor) -> Tensor:
    """Scores of answers [S], or of tokens [S, T], less what an answer pays for having no end or for its length; where
    tokens are scored its last one pays."""
    rl = options.rl
    ended = torch.tensor([each.completion.is_finished for each in trajectories])
    costs = missing_eos_scores(torch.zeros(len(trajectories), dtype=torch.float64), ended, rl.missing_eos_penalty)
    if rl.overlong_buffer:
        costs = costs - overlong_penalty(mask.sum(-1).double(), options.rollout.max_new_tokens, rl.overlong_buffer)
    if any(isinstance(each.score, tuple) for each in trajectories):
        rows = [each.score if isinstance(each.score, tuple) else _score_at_last_token(each) for each in trajectories]
        return to_token_grid(rows, mask) + torch.where(last_token_mask(mask), costs.unsqueeze(-1), 0.0)
    return torch.tensor([each.score for each in trajectories], dtype=torch.float64) + costs


def _score_at_last_token(trajectory: Rollout) -> tuple[float, ...]:
    assert isinstance(trajectory.score, float)
    return (0.0,) * (len(trajectory.logprobs) - 1) + (trajectory.score,)


def _token_advantages(rewards: Tensor, values: Tensor, mask: Tensor, options: RLOptions) -> tuple[Tensor, Tensor]:
    """Advantages, and what the critic should have expected, both [S, T]."""
    rl = options.rl
    if rl.advantage == "reinforce":
        came = discounted_returns(rewards, mask, rl.gamma)
        return came, came
    adapts, for_value = rl.length_adaptive_alpha, rl.gae_lambda if rl.value_gae_lambda is None else rl.value_gae_lambda
    trace: Tensor | float = rl.gae_lambda if adapts is None else length_adaptive_lambda(mask, adapts)
    advantages = gae_advantages(rewards, values, mask, rl.gamma, trace)
    for_critic = advantages if trace is for_value else gae_advantages(rewards, values, mask, rl.gamma, for_value)
    return advantages, for_critic + values


def _group_advantages(scores: Tensor, penalties: Tensor, mask: Tensor, options: RLOptions) -> Tensor:
    """The advantage of each answer among those to its prompt, on all of its tokens [S, T]."""
    whole = scores.sum(-1) if scores.dim() == 2 else scores
    groups = (whole - penalties.sum(-1)).view(-1, options.rl.num_generations)
    assert options.rl.advantage in ("grpo", "dr_grpo", "rloo")
    advantages = group_advantages(groups, options.rl.advantage).flatten()
    return torch.where(mask, advantages.unsqueeze(-1), 0.0)


def shaped_rewards(rollouts: Sequence[Rollout], options: RLOptions) -> list[float]:
    """What each answer earned after penalties, those for no end and for length; see `shaped_scores`."""
    lengths = [len(each.logprobs) for each in rollouts]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    scores = shaped_scores(rollouts, options, mask)
    found: list[float] = (scores.sum(-1) if scores.dim() == 2 else scores).tolist()
    return found


def completion_outcomes(
    rollouts: Sequence[Rollout], batch: RolloutBatch, options: RLOptions
) -> list[dict[str, float | None]]:
    """Of each answer drawn for a round its reward after penalties, where there are any, and the mean of its tokens'
    advantages; None for one that is not trained on."""
    rl = options.rl
    indices = select_groups(rollouts, options).indices if rl.filter_zero_variance_groups else range(len(rollouts))
    means = (batch.advantages * batch.mask).sum(-1) / batch.mask.sum(-1)
    advantage = dict(zip(indices, means.tolist(), strict=True))
    named: list[dict[str, float | None]] = [{"advantage": advantage.get(index)} for index in range(len(rollouts))]
    if rl.shapes_rewards:
        shaped = shaped_rewards(rollouts, options)
        named = [{"reward_shaped": one, **each} for one, each in zip(shaped, named, strict=True)]
    return named


def _rollout_metrics(rollouts: Sequence[Rollout], options: RLOptions) -> dict[str, float]:
    """What people want to see of all answers drawn for a round, also of those that are not trained on."""
    rl = options.rl
    found = completion_metrics(rollouts)
    if rl.shapes_rewards:
        found["reward_shaped"] = float(torch.tensor(shaped_rewards(rollouts, options), dtype=torch.float64).mean())
    if rl.num_generations > 1:
        found["frac_reward_zero_std"] = select_groups(rollouts, options).fraction_zero_std
    if rl.max_num_gen_batches > 1:
        found["num_gen_batches"] = len(rollouts) / (rl.prompts_per_rollout * rl.num_generations)
    return found
