"""From scored answers to what moves each of their tokens. Pure: no network is asked. S answers, T tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kitforge.data.packing import IGNORED
from kitforge.foundation.errors import TrainingError
from kitforge.kits.rlhf.algorithms.advantages import advantages, returns
from kitforge.kits.rlhf.algorithms.correction import importance_weights
from kitforge.kits.rlhf.algorithms.divergence import divergence
from kitforge.kits.rlhf.algorithms.groups import group_advantages, has_signal
from kitforge.kits.rlhf.algorithms.policy import explained_variance
from kitforge.kits.rlhf.algorithms.token_rewards import overlong_penalty, token_rewards, without_end
from kitforge.kits.rlhf.algorithms.whitening import whiten
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.rollouts import Round, Trajectory, grid, laid


def judged(trajectories: Sequence[Trajectory], options: RLOptions, coefficient: float, pad_id: int) -> Round:
    """All answers of a round, those to one prompt next to one another. `coefficient` is the cost of a nat. Raises
    TrainingError where the policy has diverged."""
    rl = options.rl
    _check_spoken(trajectories)
    batch = laid(trajectories, pad_id)
    mask = batch["targets"] != IGNORED
    drawn = grid([each.log_probs for each in trajectories], mask)
    old = grid([each.old for each in trajectories], mask) if trajectories[0].old else drawn
    weights = importance_weights(old, drawn, mask, options.correction)
    reference = grid([each.reference for each in trajectories], mask) if trajectories[0].reference else old
    values = grid([each.values for each in trajectories], mask) if trajectories[0].values else torch.zeros_like(old)
    scores = _scores(trajectories, options, mask)
    nats = torch.where(mask, divergence(old, reference, options.kl.estimator), 0.0)
    penalties = coefficient * nats if options.kl.used_as == "reward" else torch.zeros_like(nats)
    is_kept = mask.any(-1)
    if rl.advantage in ("gae", "reinforce"):
        rewards = token_rewards(scores, penalties, mask)
        if rl.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        gains, targets = _of_tokens(rewards, values, mask, options)
    else:
        gains, is_informed = _of_groups(scores, penalties, mask, options)
        targets = torch.zeros_like(gains)
        is_kept = is_kept & is_informed if rl.drop_equal_groups else is_kept
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
        figures=_figures(trajectories, scores, nats, mask, (values, targets)),
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


def _scores(trajectories: Sequence[Trajectory], options: RLOptions, mask: Tensor) -> Tensor:
    """Scores of answers [S], or of tokens [S, T]; less what an answer without an end costs."""
    rl = options.rl
    if any(isinstance(each.score, tuple) for each in trajectories):
        rows = [each.score if isinstance(each.score, tuple) else _at_end(each) for each in trajectories]
        return grid(rows, mask)
    scores = torch.tensor([each.score for each in trajectories], dtype=torch.float64)
    scores = without_end(scores, torch.tensor([each.answer.has_ended for each in trajectories]), rl.missing_end_penalty)
    if rl.overlong_soft:
        scores = scores - overlong_penalty(mask.sum(-1), options.rollout.max_new_tokens, rl.overlong_soft)
    return scores


def _at_end(trajectory: Trajectory) -> tuple[float, ...]:
    assert isinstance(trajectory.score, float)
    return (0.0,) * (len(trajectory.log_probs) - 1) + (trajectory.score,)


def _of_tokens(rewards: Tensor, values: Tensor, mask: Tensor, options: RLOptions) -> tuple[Tensor, Tensor]:
    """Advantages, and what the critic should have expected, both [S, T]."""
    rl = options.rl
    if rl.advantage == "reinforce":
        came = returns(rewards, mask, rl.discount)
        return came, came
    gains = advantages(rewards, values, mask, rl.discount, rl.trace)
    same = rl.value_trace is None or rl.value_trace == rl.trace
    for_critic = gains if same else advantages(rewards, values, mask, rl.discount, float(rl.value_trace or 0.0))
    return gains, for_critic + values


def _of_groups(scores: Tensor, penalties: Tensor, mask: Tensor, options: RLOptions) -> tuple[Tensor, Tensor]:
    """The advantage of each answer among those to its prompt, on all of its tokens [S, T], and whether its group said
    anything [S]."""
    whole = scores.sum(-1) if scores.dim() == 2 else scores
    groups = (whole - penalties.sum(-1)).view(-1, options.rl.samples_per_prompt)
    assert options.rl.advantage in ("grpo", "dr_grpo", "rloo")
    gains = group_advantages(groups, options.rl.advantage).flatten()
    is_informed = has_signal(groups).expand_as(groups).flatten()
    return torch.where(mask, gains.unsqueeze(-1), 0.0), is_informed


def _figures(
    trajectories: Sequence[Trajectory], scores: Tensor, nats: Tensor, mask: Tensor, critic: tuple[Tensor, Tensor]
) -> dict[str, float]:
    """What people want to see of a round; nats are those of a whole answer."""
    whole = scores.sum(-1) if scores.dim() == 2 else scores
    found = {
        "reward": float(whole.mean()),
        "kl": float(nats.sum(-1).mean()),
        "length": float(mask.sum(-1).float().mean()),
        "ended": sum(each.answer.has_ended for each in trajectories) / len(trajectories),
    }
    if trajectories[0].values:
        found["explained_variance"] = float(explained_variance(*critic, mask))
    return found
