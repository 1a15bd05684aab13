"""Length limits are per turn of an episode, as the limits are, and what is masked has no advantage."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.config import RLOptions
from kitforge.kits.rlhf.reinforcement.experience import completion_outcomes, shaped_rewards
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask, compute_experience
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from tests.kits.rlhf import runs
from tests.trainer import tiny


def episode(*turns: int, is_finished: bool = True, is_turn_ended: bool = False, score: float = 1.0) -> Rollout:
    """Turns of so many tokens with an observation of three tokens between them."""
    mask = [own for size in turns for own in (*[False] * 3, *[True] * size)][3:]
    answer = PromptCompletion(
        prompt=(1,),
        tokens=(2,) * len(mask),
        loss_mask=tuple(mask),
        turn_lengths=turns,
        is_finished=is_finished,
        is_turn_ended=is_turn_ended,
        columns={},
    )
    sizes = (0.0,) * len(turns)
    return Rollout(completion=answer, prompt_index=0, logprobs=(-1.0,) * sum(turns), score=score, turn_rewards=sizes)


def rl_options(**choices: Any) -> RLOptions:
    values = {name.replace("__", "."): value for name, value in choices.items()}
    return cast(RLOptions, TASKS["grpo"].read_options(tiny.nested(values)))


def test_a_length_limit_of_a_turn_is_that_of_each_turn() -> None:
    options = rl_options(rl__overlong_buffer=8, rollout__max_new_tokens=16)
    long = episode(4, 14, 2)
    assert shaped_rewards([episode(6, 6, 6), long, episode(18)], options) == [1.0, 1.0 - 6 / 8, 0.0]
    token_rewards = replace(long, score=(0.0,) * 19 + (1.0,))
    assert shaped_rewards([token_rewards], options) == [1.0 - 6 / 8]


def test_an_episode_is_truncated_if_its_last_turn_is() -> None:
    # Ended by the environment, after the most turns, and within a turn.
    answers = [episode(4, 5), episode(4, 5, is_finished=False, is_turn_ended=True), episode(4, 5, is_finished=False)]
    options = rl_options(rl__missing_eos_penalty=2.0, rl__mask_truncated_completions=True, rl__num_generations=3)
    assert shaped_rewards(answers, options) == [1.0, 1.0, -1.0]
    batch = compute_experience(answers, options, 0.0, 0)
    assert batch.keep_mask.tolist() == [True, True, False]
    outcomes = completion_outcomes(answers, batch, options)
    assert [each["advantage"] is None for each in outcomes] == [False, False, True]


@pytest.mark.parametrize("is_episode", [False, True])
def test_a_constant_denominator_is_the_longest_completion_allowed(is_episode: bool, tmp_path: Path) -> None:
    class Ends:
        def reset(self, row: Any) -> str:
            return ""

        def step(self, response: str) -> tuple[str, float, bool]:
            return "", float(len(response)), True

    choices = {"rollout.max_turns": 5, "rollout.max_new_tokens": 6, "data.sequence_length": 64}
    roles: dict[str, Any] = {"roles": {"environment": Ends}} if is_episode else {}
    assembly = runs.begin("dr_grpo", tmp_path, choices, **roles)
    task, _, step = runs.opened(assembly)
    counts = task.count(step)
    assert float(counts["loss"]) == float(counts["samples"]) * 6 * (5 if is_episode else 1)


def test_a_masked_completion_has_no_advantage() -> None:
    assembly = runs.begin("grpo", None, {"rl.mask_truncated_completions": True, "rollout.max_new_tokens": 6})
    task = cast(PolicyGradientTask, assembly.loop.task)
    model = cast(Any, assembly.loop.model)
    with torch.no_grad():
        model.output[ByteTokenizer.eos_id] += 0.3 * model.norm.weight
    runs.first_step(task, assembly.loop.model)
    is_cut = [not each.completion.is_finished for each in runs.collected(task)]
    assert 0 < sum(is_cut) < len(is_cut)
    assert [each["advantage"] is None for each in task.completion_outcomes] == is_cut
