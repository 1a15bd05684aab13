"""Mistakes that released projects made and that only a run shows: each is made here, and a test of ours finds it out.

Those that single functions show are in `algorithms/museum.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.optim.build import Optimizer
from kitforge.data.chat.datasets import ChatDatasetReader, TokenizedExample
from kitforge.data.text.packing import IGNORED
from kitforge.inference.text_engine import InferenceOptions
from kitforge.kits.rlhf import batching
from kitforge.kits.rlhf.algorithms.kl import KlController
from kitforge.kits.rlhf.config import RolloutOptions
from kitforge.kits.rlhf.reinforcement import rollout_batch
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, critic_of
from kitforge.trainer.state import TrainingState
from tests.data.chat import test_datasets
from tests.kits.rlhf import test_contracts
from tests.kits.rlhf.reinforcement import test_ppo, test_rollout_batch
from tests.kits.rlhf.supervised import test_reward, test_sft

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One of them."""

    project: str  # with its version
    link: str
    plant: Callable[[Patch], None]
    notices: Callable[[Patch, Path], None]  # a test that must fail then


def replace_everywhere(patch: Patch, right: Callable[..., Any], wrong: Callable[..., Any]) -> None:
    """Wherever the kit calls one function, have it call the other."""
    for module in [each for name, each in sys.modules.items() if name.startswith("kitforge.kits.rlhf")]:
        for name in [name for name, each in vars(module).items() if each is right]:
            patch.setattr(module, name, wrong)


def bounded_scores(patch: Patch) -> None:
    scores = ValueHeadModel.forward
    patch.setattr(ValueHeadModel, "forward", lambda model, *inputs: scores(model, *inputs).sigmoid())


def ends_masked_by_number(patch: Patch) -> None:
    laid = rollout_batch.pad_rollouts

    def wrong(trajectories: Any, pad_id: int) -> dict[str, Tensor]:
        found = laid(trajectories, pad_id)
        return found | {"targets": found["targets"].masked_fill(found["targets"] == pad_id, IGNORED)}

    replace_everywhere(patch, laid, wrong)


def ends_of_demonstrations_masked_by_number(patch: Patch) -> None:
    packed = batching.pack_examples

    def wrong(responses: Any, pad_id: int, **choices: Any) -> dict[str, Tensor]:
        found = packed(responses, pad_id, **choices)
        return found | {"targets": found["targets"].masked_fill(found["targets"] == pad_id, IGNORED)}

    replace_everywhere(patch, packed, wrong)


def values_after_each_token(patch: Patch) -> None:
    def late(critic: ValueHeadModel, tokens: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, critic(tokens).roll(-1, 1), 0.0)

    replace_everywhere(patch, rollout_batch.token_values, late)


def one_noise_for_all_rounds(patch: Patch) -> None:
    answered = rollout_batch.generate_rollouts
    replace_everywhere(patch, answered, lambda *given, **named: answered(*given[:-1], "41", **named))


def greedy_rollouts(patch: Patch) -> None:
    patch.setattr(RolloutOptions, "__post_init__", InferenceOptions.__post_init__)


def dropout_within_ratios(patch: Patch) -> None:
    def noisy(model: Any, tokens: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        key = DropoutKey(seed=0, step=0, samples=tuple(range(len(tokens)))) if model.training else None
        logits = model(tokens, Context(dropout=key)) / temperature
        log_probs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found = torch.where(targets >= 0, log_probs, 0.0)
        return found, torch.zeros_like(found)

    replace_everywhere(patch, rollout_batch.target_logprobs, noisy)


def moments_left_behind(patch: Patch) -> None:
    patch.setattr(Optimizer, "load", lambda optimizer, tensors: None)


def critic_left_behind(patch: Patch) -> None:
    load = TrainingState.load_weights

    def wrong(state: TrainingState, checkpoint: Any) -> None:
        critic: nn.Module = critic_of(state.model)  # type: ignore[assignment]
        fresh = [each.detach().clone() for each in critic.parameters()]
        load(state, checkpoint)
        for each, old in zip(critic.parameters(), fresh, strict=True):
            each.data.copy_(old)

    patch.setattr(TrainingState, "load_weights", wrong)


def unused_controller(patch: Patch) -> None:
    patch.setattr(KlController, "update", lambda *_: None)


def mask_one_token_off(patch: Patch) -> None:
    lay = batching._write_row

    def late(tokens: Tensor, targets: Tensor, response: TokenizedExample, start: int) -> None:
        lay(tokens, targets, dataclasses.replace(response, loss_mask=(False, *response.loss_mask[:-1])), start)

    patch.setattr(batching, "_write_row", late)


def replies_of_the_prompt(patch: Patch) -> None:
    def wrong(reader: Any, prompt: Any, completion: Any, row: Any) -> TokenizedExample:
        return reader._full_sequence([*prompt, {"role": "assistant", "content": completion}], row)

    patch.setattr(ChatDatasetReader, "_response", wrong)


def resumed(_: Patch, folder: Path) -> None:
    test_contracts.test_a_round_that_was_interrupted_goes_on_bit_for_bit("ppo", folder)


DEEPSPEED = "microsoft/DeepSpeedExamples, DeepSpeed-Chat of 2025-07"
DEEPSPEED_CODE = "https://github.com/microsoft/DeepSpeedExamples/blob/master/applications/DeepSpeed-Chat/dschat"
MISTAKES = {
    "a critic that ends in a sigmoid": Mistake(
        project="mindspore-lab/mindrlhf 0.3",
        link="https://github.com/mindspore-lab/mindrlhf/blob/master/mindrlhf/models/reward_model.py",
        plant=bounded_scores,
        notices=lambda *_: test_reward.test_scores_are_not_bounded(),
    ),
    "an adaptive coefficient that nobody moves": Mistake(
        project="mindspore-lab/mindrlhf 0.3",
        link="https://github.com/mindspore-lab/mindrlhf/blob/master/mindrlhf/trainer/ppo_trainer.py",
        plant=unused_controller,
        notices=lambda *_: test_ppo.test_an_adaptive_coefficient_moves_and_is_remembered(),
    ),
    "the end of an answer masked where it also fills rows": Mistake(
        project=DEEPSPEED,
        link=f"{DEEPSPEED_CODE}/utils/utils.py",
        plant=ends_masked_by_number,
        notices=lambda patch, _: test_ppo.test_the_end_of_an_answer_is_learnt_though_the_same_number_fills_rows(patch),
    ),
    "the end of a demonstration masked where it also fills rows": Mistake(
        project=DEEPSPEED,
        link=f"{DEEPSPEED_CODE}/utils/utils.py",
        plant=ends_of_demonstrations_masked_by_number,
        notices=lambda patch, _: test_sft.test_an_end_that_also_fills_rows_is_learnt(patch),
    ),
    "answers that are not drawn but the likeliest": Mistake(
        project=DEEPSPEED,
        link=f"{DEEPSPEED_CODE}/rlhf/ppo_trainer.py",
        plant=greedy_rollouts,
        notices=lambda *_: test_ppo.test_choices_that_cannot_be_are_refused(
            {"rollout.temperature": 0.0}, "rollout.temperature"
        ),
    ),
    "dropout where ratios are formed": Mistake(
        project=DEEPSPEED,
        link=f"{DEEPSPEED_CODE}/rlhf/ppo_trainer.py",
        plant=dropout_within_ratios,
        notices=lambda *_: test_rollout_batch.test_ratios_are_one_though_the_network_has_dropout(),
    ),
    "values one token late": Mistake(
        project="hpcaitech/ColossalAI, ColossalChat of 2025",
        link="https://github.com/hpcaitech/ColossalAI/tree/main/applications/ColossalChat/coati/experience_maker",
        plant=values_after_each_token,
        notices=lambda *_: test_rollout_batch.test_values_are_those_before_each_token_of_the_text_alone(),
    ),
    "the same noise for every round": Mistake(
        project="hpcaitech/ColossalAI, ColossalChat of 2025",
        link="https://github.com/hpcaitech/ColossalAI/tree/main/applications/ColossalChat/coati/experience_maker",
        plant=one_noise_for_all_rounds,
        notices=lambda *_: test_rollout_batch.test_every_round_and_every_place_of_it_draws_anew(),
    ),
    "a critic that is not in the checkpoint": Mistake(
        project="huggingface/trl 1.12",
        link="https://github.com/huggingface/trl/issues/1643",
        plant=critic_left_behind,
        notices=resumed,
    ),
    "the optimizer's moments begin anew at a resume": Mistake(
        project="NVIDIA-NeMo/RL 0.7",
        link="https://github.com/NVIDIA-NeMo/RL/pull/3171",
        plant=moments_left_behind,
        notices=resumed,
    ),
    "replies within the prompt are learnt": Mistake(
        project="NVIDIA-NeMo/RL",
        link="https://github.com/NVIDIA-NeMo/RL/issues/2176",
        plant=replies_of_the_prompt,
        notices=lambda *_: test_datasets.test_replies_within_a_prompt_are_not_learnt(),
    ),
    "a mask that is one token off": Mistake(
        project="volcengine/verl",
        link="https://github.com/volcengine/verl/issues/3287",
        plant=mask_one_token_off,
        notices=lambda *_: test_sft.test_the_token_after_a_prompt_is_the_first_that_is_learnt(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_out(name: str, monkeypatch: Patch, tmp_path: Path) -> None:
    MISTAKES[name].plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        MISTAKES[name].notices(monkeypatch, tmp_path)
