"""What a round of answers holds, however the networks were made and whatever fills its rows."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.linear import Linear
from kitforge.foundation.errors import TrainingError
from kitforge.foundation.types import Cursor
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import target_logprobs
from kitforge.kits.rlhf.roles.model_loading import load_policy
from kitforge.kits.rlhf.roles.reference_model import ReferenceModel
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel, critic_of, policy_of
from kitforge.models.loading import save
from tests.kits.rlhf import runs
from tests.trainer import tiny

ONE_PROMPT = [{"prompt": "Q: "}] * 8
# A policy that stays as it is.
STILL = {"trainer.max_steps": 2, "data.eval_fraction": 0.0}


def alone(network: Any, tokens: Tensor) -> Tensor:
    """What a network says of the tokens of one row, with nothing behind them."""
    with torch.no_grad():
        return cast(Tensor, network(tokens.unsqueeze(0)))[0]


def test_values_are_those_before_each_token_of_the_text_alone() -> None:
    assembly = runs.begin("ppo", None, model=runs.network(torch.float64))
    batch = runs.first_step(assembly.loop.task, assembly.loop.model)[0]
    critic, policy = critic_of(assembly.loop.model), policy_of(assembly.loop.model)
    for row, targets in enumerate(batch["targets"]):
        places = (targets >= 0).nonzero().flatten()
        text = batch["tokens"][row, : int(places[-1]) + 2]
        values = alone(critic, text)[places]
        log_probs = alone(policy, text).log_softmax(-1)[places, targets[places]]
        assert float((batch["values"][row, places] - values).abs().max()) < 1e-10
        assert float((batch["old_logprobs"][row, places] - log_probs).abs().max()) < 1e-10


def test_rubbish_behind_the_end_changes_neither_loss_nor_gradient() -> None:
    assembly = runs.begin("ppo", None, model=runs.network(torch.float64))
    task, model = assembly.loop.task, assembly.loop.model
    batch = runs.first_step(task, model)[0]
    lengths = (batch["targets"] >= 0).long().cumsum(-1).argmax(-1) + 2
    behind = torch.arange(batch["tokens"].shape[1]) >= lengths.unsqueeze(-1)
    assert behind.any()
    spoilt = dict(batch) | {"tokens": torch.where(behind, 7, batch["tokens"])}
    for name in ("old_logprobs", "ref_logprobs", "values", "advantages", "returns", "importance_weights"):
        spoilt[name] = torch.where(batch["targets"] >= 0, batch[name], float("nan"))
    assert torch.equal(slope(task, model, spoilt), slope(task, model, batch))


def slope(task: Any, model: nn.Module, batch: dict[str, Any]) -> Tensor:
    learning = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad(task.loss(model, batch)["loss"], learning)
    return torch.cat([each.flatten() for each in found])


def test_every_round_and_every_place_of_it_draws_anew() -> None:
    assembly = runs.begin("reinforce_pp", None, STILL, train_dataset=ONE_PROMPT)
    task = cast(PolicyGradientTask, assembly.loop.task)
    answers = []
    for _, number in zip(task.steps(assembly.loop.model, Cursor()), range(2), strict=False):
        assert task.collected is not None and task.collected[0] == number
        answers += [each.completion.tokens for each in runs.collected(task)]
    assert len(set(answers)) == len(answers) == 8


def test_ratios_are_one_though_the_network_has_dropout() -> None:
    network = runs.network(torch.float64, tiny.GPT2 | tiny.DROPOUT)
    for stage in runs.RL:
        assembly = runs.begin(stage, None, model=network)
        model = assembly.loop.model.train()
        batch = runs.first_step(assembly.loop.task, model)[0]
        assert abs(assembly.loop.task.loss(model, batch)["approx_kl"].item()) < 1e-10
        found, _ = target_logprobs(policy_of(model), batch["tokens"], batch["targets"], 1.0)
        assert float((found.detach() - batch["old_logprobs"]).abs().max()) < 1e-10


class Silence:
    """An environment that is never heard."""

    def reset(self, row: Any) -> str:
        return ""

    def step(self, response: str) -> tuple[str, float, bool]:
        raise AssertionError("nobody has spoken")


@pytest.mark.parametrize("roles", [{"reward": runs.letters}, {"environment": Silence}], ids=["reward", "environment"])
@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_a_policy_that_has_diverged_is_told_of(stage: str, roles: dict[str, Any]) -> None:
    network = runs.network()
    with torch.no_grad():
        next(network.parameters()).fill_(float("nan"))
    with pytest.raises(TrainingError, match=r"(?s)policy has diverged.*got:.* completions without a token.*do:"):
        runs.finish(runs.begin(stage, None, model=network, roles=roles))


@pytest.mark.parametrize("adapter", [{}, {"lora.rank": 4}])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_policy_that_has_not_moved_is_at_no_distance_in_half_precision_either(
    adapter: dict[str, Any], level: str
) -> None:
    # The network that was given was built for other kernels in one of them.
    choices = {"precision": "bf16", "compile_level": level, **adapter}
    assembly = runs.begin("grpo", None, choices)
    assert assembly.loop.task.evaluate(assembly.loop.model)["eval/kl"] == 0
    # What an answer's line says is the same.
    assert {each.kl for each in cast(PolicyGradientTask, assembly.loop.task).eval_rollouts} == {0.0}


@pytest.mark.parametrize("adapter", [{}, {"lora.rank": 4}])
def test_frozen_weights_lie_in_half_precision_and_the_policy_is_at_no_distance(
    tmp_path: Path, adapter: dict[str, Any]
) -> None:
    # Weights as they are published. Those of embeddings and norms are no products, and stay.
    save(cast(Decoder, runs.network().to(torch.bfloat16).float()), tmp_path)
    choices = {"precision": "bf16", "checkpoint": str(tmp_path), **adapter}
    assembly = runs.begin("grpo", None, choices, model=None)
    frozen = cast(Any, cast(PolicyGradientTask, assembly.loop.task)._collector)._roles.reference_model.model
    halves = {name for name, each in frozen.named_parameters() if each.dtype is torch.bfloat16}
    assert halves == {f"{name}.weight" for name, each in frozen.named_modules() if isinstance(each, Linear)}
    assert {each.dtype for each in assembly.loop.model.parameters() if each.requires_grad} == {torch.float32}
    pointers = {each.data_ptr() for each in frozen.parameters()}
    assert all((each.data_ptr() in pointers) is not each.requires_grad for each in assembly.loop.model.parameters())
    assert assembly.loop.task.evaluate(assembly.loop.model)["eval/kl"] == 0


def test_a_reward_model_lies_in_half_precision_and_scores_the_same(tmp_path: Path) -> None:
    scorer = ValueHeadModel(cast(Decoder, runs.network().to(torch.bfloat16).float()))
    scorer.reset_head(3)
    expected = ValueHeadModel(cast(Decoder, runs.network().to(torch.bfloat16).float()))
    expected.load_state_dict(scorer.state_dict())
    frozen = ReferenceModel(judges=[scorer])
    frozen.hold_in("bf16", runs.network())
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(scorer(tokens), expected(tokens))
    assert {each.weight.dtype for each in scorer.modules() if isinstance(each, Linear)} == {torch.bfloat16}


def test_a_network_that_was_handed_over_keeps_its_weights() -> None:
    network = runs.network()
    begun = runs.begin("grpo", None, {"precision": "bf16", "lora.rank": 4}, model=network)
    begun.loop.task.evaluate(begun.loop.model)
    assert {each.dtype for each in network.parameters()} == {torch.float32}


def test_a_run_beside_weights_in_half_precision_goes_on_bit_for_bit(tmp_path: Path) -> None:
    save(cast(Decoder, runs.network().to(torch.bfloat16).float()), tmp_path / "base")
    choices = {"precision": "bf16", "checkpoint": str(tmp_path / "base"), "lora.rank": 4, "trainer.max_steps": 2}
    choices |= {"trainer.checkpoint_every": 1}
    runs.finish(runs.begin("grpo", tmp_path / "whole", choices, model=None))
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "killed", 1)
    runs.finish(runs.begin("grpo", folder, choices | {"resume": "auto"}, model=None))
    tiny.assert_same(folder, tmp_path / "whole")
    assert {each.dtype for each in load_policy(folder, torch.device("cpu")).parameters()} == {torch.float32}
