"""Turns rollouts into experience: KL penalties, token rewards, advantages, returns, metrics. S rollouts, T tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from kitforge.foundation.errors import TrainingError
from kitforge.kits.rlhf.algorithms.advantages import (
    has_reward_variance,
    last_token_mask,
    missing_eos_scores,
    overlong_penalty,
)
from kitforge.kits.rlhf.algorithms.kl import kl_estimate
from kitforge.kits.rlhf.algorithms.losses import ImportanceSamplingOptions, importance_weights
from kitforge.kits.rlhf.algorithms.pass_at_k import measured_k, pass_at_k
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.reinforcement.rollout_batch import (
    Rollout,
    RolloutBatch,
    to_token_grid,
)


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


def check_not_diverged(trajectories: Sequence[Rollout]) -> None:
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
        rows = [
            each.score if isinstance(each.score, tuple) else (*[0.0] * (len(each.logprobs) - 1), each.reward)
            for each in trajectories
        ]
        return to_token_grid(rows, mask) + torch.where(last_token_mask(mask), costs.unsqueeze(-1), 0.0)
    return torch.tensor([each.score for each in trajectories], dtype=torch.float64) + costs


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


def rollout_metrics(rollouts: Sequence[Rollout], options: RLOptions) -> dict[str, float]:
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


def completion_metrics(drawn: Sequence[Rollout]) -> dict[str, float]:
    """Rewards before any penalty, each of them by its name, lengths, and how many answers came to their end.

    Deviations are over all answers, with n - 1 (of one answer 0). A reward that does not apply to an answer is left out
    of its own mean and deviation.
    """
    lengths = [len(each.logprobs) for each in drawn]
    rewards = [each.reward for each in drawn]
    ended = sum(each.completion.is_finished for each in drawn) / len(drawn)
    named = {name for each in drawn for name in each.rewards}
    found = {
        "reward": fmean(rewards),
        "reward_std": _std(rewards),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "completion/mean_length": sum(lengths) / len(lengths),
        "completion/min_length": float(min(lengths)),
        "completion/max_length": float(max(lengths)),
        "completion/eos_rate": ended,
        "completion/clipped_ratio": 1.0 - ended,
    }
    for name in sorted(named):
        values = [each.rewards[name] for each in drawn if name in each.rewards]
        found |= {f"rewards/{name}/mean": fmean(values), f"rewards/{name}/std": _std(values)}
    return found


def attempt_metrics(drawn: Sequence[Rollout], num_generations: int, threshold: float | None) -> dict[str, float]:
    """Of several answers to each prompt, those to one next to one another: `avg@n`, the mean reward, and `pass@k`, see
    `pass_at_k`, of those whose reward is at least the threshold, where there is one."""
    groups = [drawn[first : first + num_generations] for first in range(0, len(drawn), num_generations)]
    found = {f"avg@{num_generations}": fmean([each.reward for each in drawn])} if num_generations > 1 else {}
    if threshold is not None:
        correct = [sum(each.reward >= threshold for each in group) for group in groups]
        for k in measured_k(num_generations):
            found[f"pass@{k}"] = fmean([pass_at_k(num_generations, each, k) for each in correct])
    return found


def mismatch_metrics(
    old: Tensor, behaviour: Tensor, mask: Tensor, weights: Tensor | None, options: ImportanceSamplingOptions
) -> dict[str, float]:
    """How far the trainer's log-probabilities `old` are from those of the rollout engine, and what is done about it:
    `mismatch_kl`, KL(engine || trainer) in nats a token by k3, and of the importance weights, where there are any, the
    mean and the share of tokens whose ratio was out of bounds. Grids are [S, T]."""
    found = {"mismatch_kl": float(kl_estimate(behaviour, old, "k3")[mask].mean())}
    if weights is None:
        return found
    unbounded = dataclasses.replace(options, mode="truncate", min=0.0, max=math.inf)
    free = importance_weights(old, behaviour, mask, unbounded)
    assert free is not None
    found["importance_sampling/mean"] = float(weights[mask].mean())
    found["importance_sampling/truncated_ratio"] = float((free != weights)[mask].double().mean())
    return found


def _std(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0


def environment_metrics(trajectories: Sequence[Rollout]) -> dict[str, float]:
    """Turns an answer, and how many steps of an environment raised or took too long; nothing without one. Where tools
    are called, their calls an answer, and the share of these that failed."""
    if not any(each.turn_rewards for each in trajectories):
        return {}
    tools = [each for each in trajectories if each.num_tool_calls is not None]
    num_calls = sum(each.num_tool_calls or 0 for each in tools)
    frequencies = {
        "tools/call_frequency": num_calls / max(len(tools), 1),
        "tools/failure_frequency": sum(each.num_tool_failures for each in tools) / max(num_calls, 1),
    }
    num_timeouts = sum(each.has_timed_out for each in trajectories)
    num_failures = sum(each.failure is not None for each in trajectories)
    return {
        "environment/turns": sum(len(each.turn_rewards) for each in trajectories) / len(trajectories),
        "environment/errors": float(num_failures - num_timeouts),
        "environment/timeouts": float(num_timeouts),
        **(frequencies if tools else {}),
    }
