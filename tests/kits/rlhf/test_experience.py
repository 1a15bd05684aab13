"""What a run of rewards logs, and the weights it ends with, equal those of `plain_round`, whatever the options."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast, final

import pytest
import torch

from kitforge.data.tokenizer import ByteTokenizer
from kitforge.kits.rlhf.ppo import PolicyGradientTask
from kitforge.kits.rlhf.rollout_batch import Rollout
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from tests.kits.rlhf import runs
from tests.kits.rlhf.plain_round import PlainRun
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
    "rl.old_logprobs": "recompute",
    "rollout.max_staleness": 1,
    "rl.epochs": 1,
    "importance_sampling.mode": "truncate",
}
TEXTS = [(f"Q{number}: ", "yes " * (number % 3 + 1)) for number in range(5)]
PTX: Choices = {"ptx.coef": 0.7, "ptx.batch_size": 2}
# Each is small, and turns red for other faults than its neighbours.
FEW: dict[str, Choices] = {
    "ppo": PPO
    | {
        "rl.gae_lambda": 0.8,
        "rl.value_gae_lambda": 0.95,
        "rl.gamma": 0.97,
        "rl.whiten_advantages": True,
        "rl.num_minibatches": 2,
    },
    "critic beside sums over sequences": PPO
    | {"rl.loss_aggregation": "seq-mean-token-sum", "rl.value_clip_range": 0.01},
    "vapo": PPO | {"rl.length_adaptive_alpha": 0.5, "rl.value_gae_lambda": 1.0, "rl.critic_warmup": 1},
    "adaptive, rewards whitened": PPO
    | {"kl.controller": "adaptive", "kl.target": 0.01, "kl.horizon": 20}
    | {"rl.whiten_rewards": True, "rl.missing_eos_penalty": 0.5, "rollout.temperature": 0.7, "rl.epochs": 1},
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
    {"rl.value_gae_lambda": 0.0},
    {"rl.length_adaptive_alpha": 0.3},
    {"rl.whiten_rewards": True},
    {"rl.critic_warmup": 1},
]
PRODUCT: list[Choices] = [
    *(PPO | each for each in [*AXES, *OF_CRITICS]),
    *({"rl.advantage": name} | each for name in ("grpo", "dr_grpo", "rloo") for each in AXES[:12]),
    *(
        {"rl.advantage": name, "rl.filter_zero_variance_groups": True} | each
        for name in ("grpo", "rloo")
        for each in AXES[6:9]
    ),
    *(PPO | one | other for one, other in itertools.islice(itertools.product(OF_CRITICS, AXES), 0, None, 17)),
]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_rounds_of_all_options_are_those_of_the_papers(part: int, tmp_path: Path) -> None:
    for number, choices in enumerate(PRODUCT[part::12]):
        try:
            compare(tmp_path / str(number), choices)
        except AssertionError as error:
            raise AssertionError(f"{choices}: {error}") from error
