"""What a run of rewards logs, and the weights it ends with, equal those of `plain_round`, whatever the options."""

import itertools
import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import pytest
import torch

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.algorithms.losses import ImportanceSamplingOptions, importance_weights
from kitforge.kits.rlhf.reinforcement.experience import completion_metrics, mismatch_metrics
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.reinforcement.rollout_log import rollout_file
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.kits.rlhf import runs
from tests.kits.rlhf.reinforcement.plain_round import PlainRun
from tests.trainer import tiny

Choices = dict[str, Any]
COMMON: Choices = {
    "data.eval_fraction": 0.0,
    "rl.prompts_per_rollout": 3,
    "rl.num_generations": 2,
    "rl.epochs": 2,
    "rollout.max_new_tokens": 5,
    "trainer.max_steps": 4,
    "trainer.max_grad_norm": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.learning_rate": 1e-3,
    # Rounding is not to become a step where a gradient is nearly 0.
    "optimizer.eps": 1e-5,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
PPO: Choices = {"rl.advantage": "gae"}
GRPO: Choices = {"rl.advantage": "grpo"}
LOSS: Choices = {"kl.apply_to": "loss"}
STALE: Choices = {
    # Beside a loss, no answer of an older policy would have another return than its mates.
    "kl.apply_to": "reward",
    "rl.old_logprobs": "recompute",
    "rollout.max_staleness": 1,
    "rl.epochs": 1,
    "importance_sampling.mode": "truncate",
}
TEXTS = [(f"Q{number}: ", "yes " * (number % 3 + 1)) for number in range(5)]
PTX: Choices = {"ptx.coef": 0.7, "ptx.batch_size": 2}
# Each is small, and turns red for other faults than its neighbours.
FEW: dict[str, Choices] = {
    "ppo": PPO | {"rl.gae_lambda": 0.8, "rl.gamma": 0.97, "rl.whiten_advantages": True, "rl.num_minibatches": 2},
    "critic beside sums over sequences": PPO
    | {"rl.loss_aggregation": "seq-mean-token-sum", "rl.value_clip_range": 0.01},
    "the critic first": PPO | {"rl.gae_lambda": 1.0, "rl.critic_warmup": 1},
    "adaptive": PPO
    # Near what the second round measures, where the step of the controller is not clipped.
    | {"kl.controller": "adaptive", "kl.target": 1.0, "kl.horizon": 20}
    | {"rl.missing_eos_penalty": 0.5, "rollout.temperature": 0.7, "rl.epochs": 1},
    "grpo as published": GRPO | LOSS | {"kl.estimator": "k3", "kl.use_bias_correction": False},
    "k3 as a loss for the policy that drew": GRPO
    | LOSS
    | {"kl.estimator": "k3", "rl.loss_aggregation": "seq-mean-token-mean"},
    "k1 as a loss, dr_grpo": LOSS | {"rl.advantage": "dr_grpo", "rl.loss_aggregation": "constant"},
    "dapo": GRPO | {"rl.overlong_buffer": 3, "rl.filter_zero_variance_groups": True, "rl.clip_ratio_high": 0.28},
    "dropped groups, whitened": {
        "rl.advantage": "dr_grpo",
        "rl.filter_zero_variance_groups": True,
        "rl.whiten_advantages": True,
    },
    "rloo": {"rl.advantage": "rloo", "kl.coef": 0.5, "rl.entropy_coef": 0.1},
    "texts beside": {"rl.advantage": "reinforce"} | PTX,
    "answers of an older policy": {"rl.advantage": "reinforce", "kl.coef": 0.5} | STALE,
    "gspo": GRPO | {"rl.loss_mode": "gspo", "rl.clip_ratio_low": 0.003, "rl.clip_ratio_high": 0.004},
    "cispo": GRPO | {"rl.loss_mode": "cispo", "rl.clip_ratio_low": 1.0, "rl.mask_truncated_completions": True},
}


def parity(tokens: tuple[int, ...]) -> float:
    """Often equal within a group, and not always."""
    return float(sum(tokens) % 2)


def by_token(tokens: tuple[int, ...]) -> list[float]:
    return [token % 5 / 5 - 0.3 for token in tokens]


@final
class Watched(Callback):
    """Keeps the answers of each round."""

    def __init__(self) -> None:
        self.rounds: dict[int, list[Rollout]] = {}
        self.task: PolicyGradientTask | None = None

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "step":
            assert self.task is not None and self.task.collected is not None
            number, answers = self.task.collected
            self.rounds[number] = answers


def compare(folder: Path, choices: Mapping[str, Any], score: Any = parity) -> None:
    """Train, and train again by hand; every figure of every step is the same, and so are the weights."""
    model, watched = runs.network(torch.float64), Watched()
    # Some answers end.
    cast(Any, model).output.data[ByteTokenizer.eos_id] += cast(Any, model).norm.weight.data
    roles: dict[str, Any] = {"reward": lambda *, completion_tokens: [score(tuple(each)) for each in completion_tokens]}
    texts = TEXTS if "ptx.coef" in choices else []
    if texts:
        roles["ptx"] = [{"prompt": prompt, "completion": completion} for prompt, completion in texts]
    assembly = runs.begin("ppo", folder, COMMON | dict(choices), model=model, roles=roles, callbacks=[watched])
    watched.task = cast(PolicyGradientTask, assembly.loop.task)
    torch.set_default_dtype(torch.float64)
    try:
        plain = PlainRun(assembly, score, texts)
    finally:
        torch.set_default_dtype(torch.float32)
    runs.finish(assembly)
    options = cast(Any, assembly.options)
    each, steps = options.rl.updates_per_rollout, options.trainer.max_steps
    torch.set_default_dtype(torch.float64)
    try:
        for number, answers in sorted(watched.rounds.items()):
            plain.round(answers, number, min(each, steps - number * each))
    finally:
        torch.set_default_dtype(torch.float32)
    lines = [line for line in tiny.records(folder) if line["kind"] == "train"]
    assert len(lines) == len(plain.lines) == steps
    for step, (found, wanted) in enumerate(zip(lines, plain.lines, strict=True), start=1):
        for name in wanted.keys() - ({"kl"} if not options.kl.needs_reference else set()):
            assert found[name] == pytest.approx(wanted[name], rel=1e-7, abs=1e-9), f"{name} at step {step}"
    trained = [parameter for parameter in assembly.loop.model.parameters() if parameter.requires_grad]
    assert all(torch.allclose(*pair, rtol=0, atol=1e-8) for pair in zip(trained, plain.parameters, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_a_round_is_that_of_the_papers(name: str, tmp_path: Path) -> None:
    compare(tmp_path, FEW[name])


@pytest.mark.slow
def test_a_round_of_scored_tokens_is_that_of_the_papers(tmp_path: Path) -> None:
    compare(tmp_path, PPO | {"rl.missing_eos_penalty": 0.5, "rl.overlong_buffer": 2, "rl.epochs": 1}, by_token)


# Every option alone, and pairs of them, beside PPO with its critic and beside groups.
AXES: list[Choices] = [
    {"rl.clip_ratio_low": 0.01},
    {"rl.clip_ratio_high": 0.01},
    {"rl.clip_ratio_low": 0.3, "rl.clip_ratio_high": 0.3, "rl.dual_clip": 1.01},
    {"rl.entropy_coef": 0.05},
    {"rl.missing_eos_penalty": 0.7},
    {"rl.overlong_buffer": 4},
    {"rl.whiten_advantages": True},
    {"rl.mask_truncated_completions": True},
    {"rl.num_minibatches": 3},
    *({"rl.loss_aggregation": mode} for mode in ("seq-mean-token-mean", "seq-mean-token-sum", "constant")),
    *({"rl.loss_mode": mode} for mode in ("gspo", "cispo")),
    *({"kl.estimator": estimator} for estimator in ("k2", "k3")),
    *(LOSS | {"kl.estimator": estimator} for estimator in ("k1", "k2", "k3")),
    *(LOSS | {"kl.estimator": estimator, "kl.use_bias_correction": False} for estimator in ("k2", "k3")),
    {"kl.coef": 0.0, "kl.measure": True},
    {"kl.coef": 0.0},
    {"kl.controller": "adaptive", "kl.target": 0.05, "kl.horizon": 30},
    {"rollout.temperature": 1.3},
    {"rl.old_logprobs": "recompute"},
    *(
        STALE
        | {
            "importance_sampling.mode": mode,
            "importance_sampling.level": level,
            "importance_sampling.min": 0.97,
            "importance_sampling.max": 1.02,
        }
        for mode in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    ),
    PTX,
]
OF_CRITICS: list[Choices] = [
    {"rl.value_clip_range": None},
    {"rl.value_clip_range": 0.01},
    {"rl.vf_coef": 2.0},
    {"rl.gamma": 0.9},
    {"rl.gae_lambda": 0.5},
    {"rl.critic_warmup": 1},
]
ALONE: list[Choices] = [PPO | each for each in [*AXES, *OF_CRITICS]]
PAIRS: list[Choices] = [
    *({"rl.advantage": name} | each for name in ("grpo", "dr_grpo", "rloo") for each in AXES[:12]),
    *(
        {"rl.advantage": name, "rl.filter_zero_variance_groups": True} | each
        for name in ("grpo", "rloo")
        for each in AXES[6:9]
    ),
    *(PPO | one | other for one, other in itertools.islice(itertools.product(OF_CRITICS, AXES), 0, None, 17)),
]


def together(alone: list[Choices]) -> list[Choices]:
    """Fewer runs: each has up to three, of options that no other of the run sets."""
    found: list[list[Choices]] = []
    for choices in alone:
        for others in found:
            given = {name for each in others for name in each if PPO.get(name) != each[name]}
            if len(others) < 3 and not given & (choices.keys() - PPO.keys()):
                others.append(choices)
                break
        else:
            found.append([choices])
    return [{name: value for each in others for name, value in each.items()} for others in found]


# Every option; `make prove` takes each by itself, and the pairs.
PRODUCT = ALONE + PAIRS if "KITFORGE_PROVE" in os.environ else together(ALONE)


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize("part", range(12))
def test_rounds_of_all_options_are_those_of_the_papers(part: int, tmp_path: Path) -> None:
    for number, choices in enumerate(PRODUCT[part::12]):
        try:
            compare(tmp_path / str(number), choices)
        except AssertionError as error:
            raise AssertionError(f"{choices}: {error}") from error


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


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["grpo", "ppo"])
def test_engine_and_trainer_differ_by_the_rounding_of_a_pass_in_bf16(tmp_path: Path, stage: str) -> None:
    # Sharp distributions, whose logits are large.
    network = runs.network()
    with torch.no_grad():
        network.head_weight.mul_(8.0)
    choices = {"precision": "bf16", "trainer.max_steps": 1, "rl.old_logprobs": "recompute"}
    runs.finish(runs.begin(stage, tmp_path, choices, model=network))
    found = [line["mismatch_kl"] for line in tiny.records(tmp_path, "train")]
    # bfloat16 keeps eight bits of a logit, and k3 is half of a difference's square.
    assert all(0 < each < (2.0**-8) ** 2 for each in found)
