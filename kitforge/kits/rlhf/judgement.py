"""From scored answers to what moves each of their tokens. Pure: no network is asked. S answers, T tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kitforge.data.packing import IGNORED
from kitforge.foundation.errors import TrainingError
from kitforge.kits.rlhf.algorithms.advantages import advantages, length_adaptive_trace, returns
from kitforge.kits.rlhf.algorithms.correction import importance_weights
from kitforge.kits.rlhf.algorithms.divergence import divergence
from kitforge.kits.rlhf.algorithms.groups import group_advantages, has_signal
from kitforge.kits.rlhf.algorithms.policy import explained_variance
from kitforge.kits.rlhf.algorithms.token_rewards import last_token, overlong_penalty, token_rewards, without_end
from kitforge.kits.rlhf.algorithms.whitening import whiten
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.rollout_metrics import answer_metrics, mismatch_metrics
from kitforge.kits.rlhf.rollouts import Round, Trajectory, episode_figures, grid, laid


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which of the answers drawn for a round are trained on."""

    places: list[int]  # of the answers of `prompts_per_step` groups, in the order in which they were drawn
    has_signal: list[bool]  # of each of these answers: whether the rewards of its group differ
    is_full: bool  # whether all of them do
    num_prompts: int  # prompts up to the last one that was needed; the next round begins behind it
    fraction_without: float  # of all groups drawn


def select(drawn: Sequence[Trajectory], options: RLOptions) -> Selection:
    """Dynamic sampling (DAPO; Yu et al., 2025): the first `prompts_per_step` groups whose rewards differ, before any
    penalty; where there are fewer, the first of the others fill the round up, and count for nothing."""
    rl = options.rl
    rewards = torch.tensor([each.reward for each in drawn], dtype=torch.float64).view(-1, rl.samples_per_prompt)
    signal: list[bool] = has_signal(rewards).flatten().tolist()
    with_signal = [group for group, differs in enumerate(signal) if differs]
    without = [group for group, differs in enumerate(signal) if not differs]
    is_full = len(with_signal) >= rl.prompts_per_step
    # Also for a round that drops nothing, whose groups all take part.
    groups = sorted((with_signal + without)[: rl.prompts_per_step])
    return Selection(
        places=[group * rl.samples_per_prompt + sample for group in groups for sample in range(rl.samples_per_prompt)],
        has_signal=[signal[group] for group in groups for _ in range(rl.samples_per_prompt)],
        is_full=is_full,
        num_prompts=groups[-1] + 1 if is_full else len(signal),
        fraction_without=len(without) / len(signal),
    )


def judged(everyone: Sequence[Trajectory], options: RLOptions, coefficient: float, pad_id: int) -> Round:
    """The answers drawn for a round, those to one prompt next to one another, as what is trained on; see `select` for
    rounds that drop groups. `coefficient` is the cost of a nat. Raises TrainingError where the policy has diverged."""
    rl = options.rl
    _check_spoken(everyone)
    chosen = select(everyone, options) if rl.drop_equal_groups else None
    trajectories = everyone if chosen is None else [everyone[place] for place in chosen.places]
    batch = laid(trajectories, pad_id)
    mask = batch["targets"] != IGNORED
    drawn = grid([each.log_probs for each in trajectories], mask)
    old = grid([each.old for each in trajectories], mask) if trajectories[0].old else drawn
    weights = importance_weights(old, drawn, mask, options.correction)
    reference = grid([each.reference for each in trajectories], mask) if trajectories[0].reference else old
    values = grid([each.values for each in trajectories], mask) if trajectories[0].values else torch.zeros_like(old)
    scores = shaped_scores(trajectories, options, mask)
    nats = torch.where(mask, divergence(old, reference, options.kl.estimator), 0.0)
    penalties = coefficient * nats if options.kl.used_as == "reward" else torch.zeros_like(nats)
    is_kept = torch.tensor([each.answer.has_ended or not rl.mask_truncated_completions for each in trajectories])
    if chosen is not None:
        is_kept = is_kept & torch.tensor(chosen.has_signal)
    if rl.advantage in ("gae", "reinforce"):
        rewards = token_rewards(scores, penalties, mask)
        if rl.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        gains, targets = _of_tokens(rewards, values, mask, options)
    else:
        gains = _of_groups(scores, penalties, mask, options)
        targets = torch.zeros_like(gains)
    if rl.whiten_advantages:
        gains = whiten(gains, mask & is_kept.unsqueeze(-1))
    return Round(
        tokens=batch["tokens"],
        targets=batch["targets"],
        old=old,
        weights=torch.ones_like(old) if weights is None else weights,
        reference=reference,
        values=values,
        advantages=gains,
        returns=targets,
        is_kept=is_kept,
        figures=_of_answers(everyone, options)
        | episode_figures(everyone)
        | (mismatch_metrics(old, drawn, mask, weights, options.correction) if trajectories[0].old else {})
        | ({"kl": float(nats.sum(-1).mean())} if trajectories[0].reference else {})
        | ({"explained_variance": float(explained_variance(values, targets, mask))} if trajectories[0].values else {}),
    )


def _check_spoken(trajectories: Sequence[Trajectory]) -> None:
    """Raise TrainingError for answers without a token, which nothing but a policy that has diverged gives."""
    if not all(each.log_probs for each in trajectories):
        raise TrainingError(
            "the policy no longer answers: what it makes of a prompt is not a number",
            got=f"{sum(not each.log_probs for each in trajectories)} of {len(trajectories)} answers without a token",
            expected="finite logits",
            fix="go on from a checkpoint before that, with a smaller optimizer.learning_rate",
        )


def shaped_scores(trajectories: Sequence[Trajectory], options: RLOptions, mask: Tensor) -> Tensor:
    """Scores of answers [S], or of tokens [S, T], less what an answer pays for having no end or for its length; where
    tokens are scored its last one pays."""
    rl = options.rl
    ended = torch.tensor([each.answer.has_ended for each in trajectories])
    costs = without_end(torch.zeros(len(trajectories), dtype=torch.float64), ended, rl.missing_end_penalty)
    if rl.overlong_soft:
        costs = costs - overlong_penalty(mask.sum(-1).double(), options.rollout.max_new_tokens, rl.overlong_soft)
    if any(isinstance(each.score, tuple) for each in trajectories):
        rows = [each.score if isinstance(each.score, tuple) else _at_end(each) for each in trajectories]
        return grid(rows, mask) + torch.where(last_token(mask), costs.unsqueeze(-1), 0.0)
    return torch.tensor([each.score for each in trajectories], dtype=torch.float64) + costs


def _at_end(trajectory: Trajectory) -> tuple[float, ...]:
    assert isinstance(trajectory.score, float)
    return (0.0,) * (len(trajectory.log_probs) - 1) + (trajectory.score,)


def _of_tokens(rewards: Tensor, values: Tensor, mask: Tensor, options: RLOptions) -> tuple[Tensor, Tensor]:
    """Advantages, and what the critic should have expected, both [S, T]."""
    rl = options.rl
    if rl.advantage == "reinforce":
        came = returns(rewards, mask, rl.discount)
        return came, came
    adapts, for_value = rl.length_adaptive_alpha, rl.trace if rl.value_trace is None else rl.value_trace
    trace: Tensor | float = rl.trace if adapts is None else length_adaptive_trace(mask, adapts)
    gains = advantages(rewards, values, mask, rl.discount, trace)
    for_critic = gains if trace is for_value else advantages(rewards, values, mask, rl.discount, for_value)
    return gains, for_critic + values


def _of_groups(scores: Tensor, penalties: Tensor, mask: Tensor, options: RLOptions) -> Tensor:
    """The advantage of each answer among those to its prompt, on all of its tokens [S, T]."""
    whole = scores.sum(-1) if scores.dim() == 2 else scores
    groups = (whole - penalties.sum(-1)).view(-1, options.rl.samples_per_prompt)
    assert options.rl.advantage in ("grpo", "dr_grpo", "rloo")
    gains = group_advantages(groups, options.rl.advantage).flatten()
    return torch.where(mask, gains.unsqueeze(-1), 0.0)


def shaped_rewards(drawn: Sequence[Trajectory], options: RLOptions) -> list[float]:
    """What each answer earned after penalties, those for no end and for length; see `shaped_scores`."""
    lengths = [len(each.log_probs) for each in drawn]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    scores = shaped_scores(drawn, options, mask)
    found: list[float] = (scores.sum(-1) if scores.dim() == 2 else scores).tolist()
    return found


def outcomes(drawn: Sequence[Trajectory], found: Round, options: RLOptions) -> list[dict[str, float | None]]:
    """Of each answer drawn for a round its reward after penalties, where there are any, and the mean of its tokens'
    advantages; None for one that is not trained on."""
    rl = options.rl
    places = select(drawn, options).places if rl.drop_equal_groups else range(len(drawn))
    means = (found.advantages * found.mask).sum(-1) / found.mask.sum(-1)
    advantage = dict(zip(places, means.tolist(), strict=True))
    named: list[dict[str, float | None]] = [{"advantage": advantage.get(place)} for place in range(len(drawn))]
    if rl.shapes_rewards:
        shaped = shaped_rewards(drawn, options)
        named = [{"reward_shaped": one, **each} for one, each in zip(shaped, named, strict=True)]
    return named


def _of_answers(drawn: Sequence[Trajectory], options: RLOptions) -> dict[str, float]:
    """What people want to see of all answers drawn for a round, also of those that are not trained on."""
    rl = options.rl
    found = answer_metrics(drawn)
    if rl.shapes_rewards:
        found["reward_shaped"] = float(torch.tensor(shaped_rewards(drawn, options), dtype=torch.float64).mean())
    if rl.samples_per_prompt > 1:
        found["frac_reward_zero_std"] = select(drawn, options).fraction_without
    if rl.max_num_gen_batches > 1:
        found["num_gen_batches"] = len(drawn) / (rl.prompts_per_step * rl.samples_per_prompt)
    return found
