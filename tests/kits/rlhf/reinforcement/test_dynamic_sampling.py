"""Dynamic sampling: a round is filled with groups whose rewards differ, and a step without any moves nothing."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kitforge.api import replay
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import Cursor
from kitforge.kits.rlhf.reinforcement import rollout_collector
from kitforge.kits.rlhf.reinforcement.experience import select_groups
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from tests.kits.rlhf import runs, test_role_ranks
from tests.trainer import tiny

# 24 prompts in the order of their numbers; those that three divides never score differently.
CHOICES: dict[str, Any] = {
    "data.eval_fraction": 0.0,
    "data.shuffle": False,
    "rl.overlong_buffer": 0,
    "rl.num_generations": 3,
    "rl.max_num_gen_batches": 4,
    "kl.coef": 0.0,
}


def two_of_three(*, completion_tokens: list[list[int]], answer: list[str]) -> list[float]:
    return [float(int(number) % 3 != 0) * sum(tokens) for tokens, number in zip(completion_tokens, answer, strict=True)]


def nothing(*, completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def once(*, completion_tokens: list[list[int]], seen: list[int] = []) -> list[float]:  # noqa: B006 (counts its calls)
    """Rewards of one round, and then no more."""
    seen.append(1)
    return [float(sum(tokens)) if len(seen) == 1 else 0.0 for tokens in completion_tokens]


def begin(choices: dict[str, Any], folder: Path | None = None, reward: Any = two_of_three) -> Any:
    return runs.begin("dapo", folder, CHOICES | choices, roles={"reward": reward})


def test_a_round_is_filled_with_groups_that_differ_and_the_next_begins_behind_them() -> None:
    assembly = begin({"rl.prompts_per_rollout": 5})
    task = cast(PolicyGradientTask, assembly.loop.task)
    rounds = []
    for _ in zip(range(2), task.steps(assembly.loop.model, Cursor()), strict=False):
        assert task._batch is not None
        drawn = runs.collected(task)
        places = select_groups(drawn, assembly.options).indices
        # A part in a billion is a difference, which no single precision holds.
        close = [dataclasses.replace(each, score=1 + 1e-9 * each.reward) for each in drawn]
        assert select_groups(close, assembly.options).indices == places
        rounds.append([drawn[place].prompt_index for place in places][::3])
        figures = task._batch.metrics
        assert figures["num_gen_batches"] == 2
        assert figures["frac_reward_zero_std"] == pytest.approx(4 / 10 if len(rounds) == 1 else 3 / 10)
        assert task._batch.keep_mask.all() and len(task._batch.keep_mask) == 15
    # Of prompts 0 to 9, 0, 3, 6 and 9 are left out; the second round begins with prompt 8, and leaves out 9, 12 and 15.
    assert rounds == [[1, 2, 4, 5, 7], [0, 2, 3, 5, 6]]
    assert task.state()["next_prompt"] == 15


def test_the_filter_looks_at_the_reward_before_penalties() -> None:
    # Lengths differ, and so do the penalties; that no answer is right tells nothing all the same.
    assembly = begin({"rl.overlong_buffer": 5, "rl.missing_eos_penalty": 1.0}, reward=nothing)
    task, _, step = runs.opened(assembly)
    assert float(task.count(step)["loss"]) == 0
    assert task._batch is not None and task._batch.metrics["num_gen_batches"] == 4
    assert task._batch.metrics["reward_shaped"] < 0


def test_a_step_without_a_token_moves_neither_weights_nor_moments_and_is_counted(tmp_path: Path) -> None:
    once.__defaults__ = ([],)  # type: ignore[attr-defined]
    choices = {"rl.max_num_gen_batches": 1, "trainer.checkpoint_every": 1, "trainer.save_total_limit": 9}
    assembly = begin(choices | {"trainer.max_steps": 3}, tmp_path, once)
    metrics = runs.finish(assembly)
    found = [open_checkpoint(step_folder(tmp_path / "checkpoints", step)) for step in (1, 2, 3)]
    for part in ("model", "optimizer"):
        first, *others = ({name: tensor for name, tensor in getattr(each, part)()} for each in found)
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    lines = [each for each in tiny.records(tmp_path) if each["kind"] == "train"]
    assert [each["skipped"] for each in lines] == [0, 1, 2]
    assert ["loss" in each for each in lines] == [True, False, False]
    assert [each["reward"] for each in lines[1:]] == [0.0, 0.0]
    assert [each["frac_reward_zero_std"] for each in lines] == [0.0, 1.0, 1.0]
    assert all(map(math.isfinite, metrics.values()))
    assert [each.split(":")[0] for each in tiny.events(tmp_path, "skip")] == [
        f"nothing to learn from in step {step}" for step in (2, 3)
    ]
    assert assembly.loop.state.updates == 1


@pytest.mark.slow
def test_a_resampled_round_that_was_interrupted_goes_on_bit_for_bit(tmp_path: Path) -> None:
    choices = {
        "rl.prompts_per_rollout": 5,
        "rl.num_minibatches": 3,
        "trainer.max_steps": 7,
        "trainer.checkpoint_every": 1,
        "trainer.save_total_limit": 9,
    }
    runs.finish(begin(choices, tmp_path / "whole"))
    lines = [each for each in tiny.records(tmp_path / "whole") if each["kind"] == "train"]
    assert max(each["num_gen_batches"] for each in lines) == 2
    for killed in (1, 3, 5):
        folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / f"killed_{killed}", killed)
        runs.finish(begin(choices | {"resume": "auto"}, folder))
        tiny.assert_same(folder, tmp_path / "whole")
    # A step is the same again from the answers that were kept, those that were left out among them.
    assert replay(tmp_path / "whole", 5).is_same
    kept = (tmp_path / "whole" / "rollouts" / "round_0.jsonl").read_text().splitlines()
    assert len(kept) == 2 * 5 * 3
    assert [json.loads(each)["prompt_index"] for each in kept] == [place for place in range(10) for _ in range(3)]


@pytest.mark.slow
def test_ranks_of_their_own_fill_a_round_as_one_process_does(tmp_path: Path) -> None:
    choices = CHOICES | {"rl.prompts_per_rollout": 5, "kl.measure": True}
    one = test_role_ranks.run("dapo", tmp_path / "one", choices, roles={"reward": two_of_three})
    (ranks,) = test_role_ranks.together(
        [tmp_path / "three"], [("dapo", choices | test_role_ranks.at([1, 2], [0], [2]))], played
    )
    test_role_ranks.assert_equal(tmp_path / "three", ranks, tmp_path / "one", one, False, "dapo")


def played(_rank: int, folders: list[Path], cases: list[Any]) -> list[Any]:
    return [test_role_ranks.run(cases[0][0], folders[0], cases[0][1], roles={"reward": two_of_three})]


def test_a_cost_of_zero_holds_and_asks_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    honest = rollout_collector.target_logprobs

    def counted(network: Any, *given: Any) -> Any:
        asked.append(network)
        return honest(network, *given)

    monkeypatch.setattr(rollout_collector, "target_logprobs", counted)
    assembly = begin({"trainer.max_steps": 2})
    metrics = runs.finish(assembly)
    task: Any = assembly.loop.task
    assert task._collector._roles.reference_model.model is None
    assert asked == [] and "kl" not in metrics and "eval/kl" not in metrics


@pytest.mark.parametrize(
    ("choices", "roles"), [({"kl.measure": True}, {}), ({}, {"reference": runs.network()})], ids=["option", "role"]
)
def test_distance_can_be_measured_where_it_costs_nothing(choices: dict[str, Any], roles: dict[str, Any]) -> None:
    given = CHOICES | {"data.eval_fraction": 0.2, "trainer.max_steps": 2} | choices
    with_kl = runs.begin("dapo", None, given, roles={"reward": runs.letters} | roles)
    metrics = runs.finish(with_kl)
    assert metrics["kl"] != 0 and metrics["eval/kl"] != 0
    without = runs.begin("dapo", None, given | {"kl.measure": False})
    runs.finish(without)
    pairs = zip(with_kl.loop.model.parameters(), without.loop.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            {"rl.filter_zero_variance_groups": False},
            r"max_num_gen_batches.*\n.*got: +4\n.*filter_zero_variance_groups=true",
        ),
        (
            {"rl.old_logprobs": "recompute", "importance_sampling.mode": "mask", "rollout.max_staleness": 1},
            r"with rl\.max_num_gen_batches",
        ),
        ({"role_ranks.reference": [0]}, r"role_ranks\.reference.*\n.*\n.*kl\.measure=true"),
        ({"kl.estimator": "k1", "kl.use_bias_correction": False}, r"the mean gradient of k1 alone is zero"),
    ],
)
def test_what_does_not_go_together_is_refused(choices: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        begin(choices)
