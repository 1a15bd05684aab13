"""What people want to see of the answers drawn for a round or an evaluation, as figures by name. Pure. S answers, T
tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kitforge.kits.rlhf.algorithms.importance_sampling import ImportanceSamplingOptions, importance_weights
from kitforge.kits.rlhf.algorithms.kl import kl_estimate
from kitforge.kits.rlhf.algorithms.pass_at_k import measured_k, pass_at_k
from kitforge.kits.rlhf.rollout_batch import Rollout


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
        "reward": _mean(rewards),
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
        found |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    return found


def attempt_metrics(drawn: Sequence[Rollout], num_generations: int, threshold: float | None) -> dict[str, float]:
    """Of several answers to each prompt, those to one next to one another: `avg@n`, the mean reward, and `pass@k`, see
    `pass_at_k`, of those whose reward is at least the threshold, where there is one."""
    groups = [drawn[first : first + num_generations] for first in range(0, len(drawn), num_generations)]
    found = {f"avg@{num_generations}": _mean([each.reward for each in drawn])} if num_generations > 1 else {}
    if threshold is not None:
        correct = [sum(each.reward >= threshold for each in group) for group in groups]
        for k in measured_k(num_generations):
            found[f"pass@{k}"] = _mean([pass_at_k(num_generations, each, k) for each in correct])
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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).std()) if len(values) > 1 else 0.0
