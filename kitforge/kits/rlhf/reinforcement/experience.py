"""Turns rollouts into experience: KL penalties, token rewards, advantages, returns, metrics. S rollouts, T tokens."""

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
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout, RolloutBatch, to_token_grid


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSelection:
    """The completions of a rollout batch that are trained on."""

    indices: list[int]  # completions of `prompts_per_rollout` groups, in the order of generation
    has_signal: list[bool]  # per selected completion: whether the rewards of its group differ
    is_full: bool  # whether enough groups have different rewards
    num_prompts: int  # prompts consumed; the next rollout batch starts after them
    fraction_zero_std: float  # fraction of all generated groups whose rewards are equal


def select_groups(rollouts: Sequence[Rollout], options: RLOptions) -> GroupSelection:
    """Dynamic sampling (DAPO; Yu et al., 2025): the first `prompts_per_rollout` groups whose rewards, before penalties,
    differ. If there are fewer, groups of equal rewards fill the batch up; they are masked from the loss."""
    rl = options.rl
    rewards = torch.tensor([each.reward for each in rollouts], dtype=torch.float64).view(-1, rl.num_generations)
    signal: list[bool] = has_reward_variance(rewards).flatten().tolist()
    with_signal = [group for group, differs in enumerate(signal) if differs]
    without = [group for group, differs in enumerate(signal) if not differs]
    is_full = len(with_signal) >= rl.prompts_per_rollout
    # Without surplus groups, all of them are selected.
    groups = sorted((with_signal + without)[: rl.prompts_per_rollout])
    return GroupSelection(
        indices=[group * rl.num_generations + sample for group in groups for sample in range(rl.num_generations)],
        has_signal=[signal[group] for group in groups for _ in range(rl.num_generations)],
        is_full=is_full,
        num_prompts=groups[-1] + 1 if is_full else len(signal),
        fraction_zero_std=len(without) / len(signal),
    )


def check_not_diverged(rollouts: Sequence[Rollout]) -> None:
    """Raise TrainingError for completions without tokens: only a policy with non-finite logits generates none."""
    if not all(each.logprobs for each in rollouts):
        raise TrainingError(
            "the policy has diverged: its logits are not finite",
            got=f"{sum(not each.logprobs for each in rollouts)} of {len(rollouts)} completions without a token",
            expected="finite logits",
            fix="resume from an earlier checkpoint with a smaller optimizer.learning_rate",
        )


def shaped_scores(rollouts: Sequence[Rollout], options: RLOptions, mask: Tensor) -> Tensor:
    """Rewards of completions [S], or of tokens [S, T], minus the missing-EOS and length penalties. With token rewards,
    the penalties are subtracted at the last token."""
    rl = options.rl
    ended = torch.tensor([not each.completion.is_truncated for each in rollouts])
    costs = missing_eos_scores(torch.zeros(len(rollouts), dtype=torch.float64), ended, rl.missing_eos_penalty)
    if rl.overlong_buffer:
        # The limit is that of a turn.
        lengths = torch.tensor([each.completion.longest_turn for each in rollouts], dtype=torch.float64)
        costs = costs - overlong_penalty(lengths, options.rollout.max_new_tokens, rl.overlong_buffer)
    if any(isinstance(each.score, tuple) for each in rollouts):
        rows = [
            each.score if isinstance(each.score, tuple) else (*[0.0] * (len(each.logprobs) - 1), each.reward)
            for each in rollouts
        ]
        return to_token_grid(rows, mask) + torch.where(last_token_mask(mask), costs.unsqueeze(-1), 0.0)
    return torch.tensor([each.score for each in rollouts], dtype=torch.float64) + costs


def shaped_rewards(rollouts: Sequence[Rollout], options: RLOptions) -> list[float]:
    """The reward of each completion after the missing-EOS and length penalties, see `shaped_scores`."""
    lengths = [len(each.logprobs) for each in rollouts]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    scores = shaped_scores(rollouts, options, mask)
    found: list[float] = (scores.sum(-1) if scores.dim() == 2 else scores).tolist()
    return found


def completion_outcomes(
    rollouts: Sequence[Rollout], batch: RolloutBatch, options: RLOptions
) -> list[dict[str, float | None]]:
    """Per completion of a rollout batch: the reward after penalties, if any are on, and the mean advantage of its
    tokens, None for a completion that is not trained on."""
    rl = options.rl
    indices = select_groups(rollouts, options).indices if rl.filter_zero_variance_groups else range(len(rollouts))
    means = (batch.advantages * batch.mask).sum(-1) / batch.mask.sum(-1)
    outcomes = zip(indices, means.tolist(), batch.keep_mask.tolist(), strict=True)
    advantage = {index: mean for index, mean, is_kept in outcomes if is_kept}
    named: list[dict[str, float | None]] = [{"advantage": advantage.get(index)} for index in range(len(rollouts))]
    if rl.shapes_rewards:
        shaped = shaped_rewards(rollouts, options)
        named = [{"reward_shaped": one, **each} for one, each in zip(shaped, named, strict=True)]
    return named


def rollout_metrics(rollouts: Sequence[Rollout], options: RLOptions) -> dict[str, float]:
    """Metrics over all completions of a rollout batch, including those that are not trained on."""
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
    """Rewards before penalties, in total and by name, completion lengths and the fraction with an EOS token.

    Standard deviations divide by n - 1 (0 for one completion). Means and deviations of a named reward cover the
    completions to which it applies.
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
    """Metrics of n completions per prompt, adjacent in `drawn`: `avg@n`, the mean reward, and with a threshold
    `pass@k`, where a completion is correct if its reward is at least the threshold; see `pass_at_k`."""
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
    """Mismatch between the trainer's log-probs `old` and those of the rollout engine, both [S, T]: `mismatch_kl`,
    KL(engine || trainer) in nats per token, estimated by k3. With importance weights also their mean and the fraction
    of tokens whose ratio was out of bounds."""
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


def environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Turns per completion, and the number of environment steps that raised or timed out; empty without an environment.
    With tools also the calls per completion and the fractions of calls that failed and whose tool raised."""
    if not any(each.turn_rewards for each in rollouts):
        return {}
    tools = [each for each in rollouts if each.num_tool_calls is not None]
    num_calls = sum(each.num_tool_calls or 0 for each in tools)
    # NaN of no calls: no failure among nothing is not the best there is.
    frequencies = {
        "tools/call_frequency": num_calls / max(len(tools), 1),
        "tools/failure_frequency": sum(each.num_tool_failures for each in tools) / (num_calls or math.nan),
        "tools/error_frequency": sum(each.num_tool_errors for each in tools) / (num_calls or math.nan),
    }
    num_timeouts = sum(each.has_timed_out for each in rollouts)
    num_failures = sum(each.failure is not None for each in rollouts)
    return {
        "environment/turns": sum(len(each.turn_rewards) for each in rollouts) / len(rollouts),
        "environment/errors": float(num_failures - num_timeouts),
        "environment/timeouts": float(num_timeouts),
        **(frequencies if tools else {}),
    }
