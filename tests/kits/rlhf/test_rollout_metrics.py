"""What a round says of its answers: rewards by name, before and after penalties, lengths, and how far the engine is."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.importance_sampling import ImportanceSamplingOptions, importance_weights
from kitforge.kits.rlhf.ppo import PolicyGradientTask
from kitforge.kits.rlhf.rewards import PromptCompletion
from kitforge.kits.rlhf.rollout_batch import Rollout
from kitforge.kits.rlhf.rollout_log import rollout_file
from kitforge.kits.rlhf.rollout_metrics import completion_metrics, mismatch_metrics
from tests.kits.rlhf import runs
from tests.trainer import tiny


def drawn(score: float, size: int, *, has_ended: bool, **rewards: float) -> Rollout:
    answer = PromptCompletion(prompt=(1,), tokens=(2,) * size, is_finished=has_ended, columns={})
    return Rollout(completion=answer, prompt_index=0, logprobs=(-1.0,) * size, score=score, rewards=rewards)


def test_rewards_have_a_mean_and_a_deviation_by_name_over_the_answers_that_they_apply_to() -> None:
    answers = [
        drawn(1.0, 2, has_ended=True, exact=1.0, short=-2.0),
        drawn(4.0, 5, has_ended=False, exact=0.0),
        drawn(1.0, 3, has_ended=True, exact=1.0, short=-4.0),
    ]
    found = completion_metrics(answers)
    assert found == {
        "reward": 2.0,
        "reward_std": pytest.approx(math.sqrt(3.0)),
        "reward_min": 1.0,
        "reward_max": 4.0,
        "completion/mean_length": pytest.approx(10 / 3),
        "completion/min_length": 2.0,
        "completion/max_length": 5.0,
        "completion/eos_rate": pytest.approx(2 / 3),
        "completion/clipped_ratio": pytest.approx(1 / 3),
        "rewards/exact/mean": pytest.approx(2 / 3),
        "rewards/exact/std": pytest.approx(statistics.stdev([1.0, 0.0, 1.0])),
        "rewards/short/mean": -3.0,
        "rewards/short/std": pytest.approx(math.sqrt(2.0)),
    }
    assert completion_metrics(answers[:1])["reward_std"] == 0.0


def test_the_mismatch_of_engine_and_trainer_counts_true_tokens_alone() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    behaviour = torch.full((2, 3), -1.0, dtype=torch.float64)
    ratios = torch.tensor([[1.0, 4.0, 9.0], [0.5, 2.0, 3.0]], dtype=torch.float64)
    old, own = behaviour + ratios.log(), ratios[mask]
    for mode, wanted in (("truncate", own.clamp(max=2.0)), ("mask", torch.where(own > 2.0, 0.0, own))):
        options = ImportanceSamplingOptions(mode=mode, max=2.0)  # type: ignore[arg-type]
        weights = importance_weights(old, behaviour, mask, options)
        found = mismatch_metrics(old, behaviour, mask, weights, options)
        assert found["mismatch_kl"] == pytest.approx(float((own - 1 - own.log()).mean()))
        assert found["importance_sampling/mean"] == pytest.approx(float(wanted.mean()))
        assert found["importance_sampling/truncated_ratio"] == pytest.approx(2 / 5)
    assert set(mismatch_metrics(old, behaviour, mask, None, ImportanceSamplingOptions())) == {"mismatch_kl"}


def judge(*, completions: list[str]) -> list[dict[str, Any]]:
    return [{"score": len(text) / 8, "acc": "a" in text} for text in completions]


def test_metrics_rollouts_and_evaluations_call_the_raw_and_the_shaped_reward_alike(tmp_path: Path) -> None:
    choices = {
        "trainer.max_steps": 1,
        "rl.missing_eos_penalty": 2.0,
        "rl.old_logprobs": "recompute",
        "importance_sampling.mode": "truncate",
        "importance_sampling.max": 1.0,
    }
    roles = {"reward": {"judge": (0.5, judge), "letters": runs.letters}}
    metrics = runs.finish(runs.begin("grpo", tmp_path, choices, roles=roles))
    line = tiny.records(tmp_path, "train")[0]
    answers = [json.loads(each) for each in rollout_file(tmp_path, 0).read_text().splitlines()]
    for name in ("reward", "reward_shaped"):
        assert line[name] == pytest.approx(statistics.fmean(each[name] for each in answers), abs=1e-6)
        assert math.isfinite(metrics[f"eval/{name}"])
    assert metrics["eval/reward_shaped"] < metrics["eval/reward"] - 0.1
    assert line["reward_shaped"] < line["reward"] - 0.1
    for name in ("judge", "judge/acc", "letters"):
        values = [each["rewards"][name] for each in answers]
        assert line[f"rewards/{name}/mean"] == pytest.approx(statistics.fmean(values), abs=1e-6)
        assert line[f"rewards/{name}/std"] == pytest.approx(statistics.stdev(values), abs=1e-6)
        assert f"eval/rewards/{name}/mean" in metrics
    assert all(
        each["reward"] == pytest.approx(each["rewards"]["judge"] / 2 + each["rewards"]["letters"]) for each in answers
    )
    assert sum(each["advantage"] for each in answers) == pytest.approx(0.0, abs=1e-6)
    assert {"mismatch_kl", "importance_sampling/mean", "importance_sampling/truncated_ratio"} <= line.keys()
    assert "frac_reward_zero_std" in line


def evaluated(**choices: Any) -> tuple[dict[str, float], list[Rollout]]:
    given = {f"rl.eval.{name}": value for name, value in choices.items()}
    assembly = runs.begin("ppo", None, given | {"rl.missing_eos_penalty": 2.0})
    return assembly.loop.evaluate(), cast(PolicyGradientTask, assembly.loop.task).eval_rollouts


def test_an_evaluation_of_several_answers_tells_how_often_a_prompt_is_solved() -> None:
    plain, once = evaluated()
    found, answers = evaluated(num_generations=3, pass_threshold=0.5)
    assert len(answers) == 3 * len(once) and not any("@" in name for name in plain)
    groups = [answers[first : first + 3] for first in range(0, len(answers), 3)]
    assert all(len({each.completion.prompt for each in group}) == 1 for group in groups)
    assert len({each.completion.tokens for each in groups[0]}) > 1
    rewards = [[each.reward for each in group] for group in groups]
    solved = [[each >= 0.5 for each in group] for group in rewards]
    assert 0 < sum(map(sum, solved)) < len(answers)
    assert found["eval/avg@3"] == found["eval/reward"] == pytest.approx(statistics.fmean(sum(rewards, [])))
    assert found["eval/pass@1"] == pytest.approx(statistics.fmean(sum(solved, [])))
    pairs = [any(pair) for group in solved for pair in itertools.combinations(group, 2)]
    assert found["eval/pass@2"] == pytest.approx(statistics.fmean(pairs))
    assert found["eval/pass@3"] == pytest.approx(statistics.fmean(map(any, solved)))


def test_a_greedy_evaluation_takes_the_likeliest_tokens_and_tells_no_divergence() -> None:
    sampled, _ = evaluated()
    greedy, answers = evaluated(temperature=0.0)
    assert "eval/kl" in sampled and sampled.keys() - greedy.keys() == {"eval/kl"}
    network = cast(CausalLM, runs.network())
    for each in answers[:3]:
        text = torch.tensor([[*each.completion.prompt, *each.completion.tokens]])
        likeliest = network(text)[0].argmax(-1)[len(each.completion.prompt) - 1 : -1]
        assert likeliest.tolist() == list(each.completion.tokens)
    with pytest.raises(ConfigError, match=r"num_generations.*\n.*\n.*all are the same"):
        evaluated(temperature=0.0, num_generations=2)
