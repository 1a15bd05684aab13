"""Networks of one stage read the same tokens, and none of them has dropout where they are compared."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.role_ranks import RoleRanksOptions
from kitforge.kits.rlhf.roles.placement import RolePlacement
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel
from kitforge.trainer.run_folder import Run
from tests.kits.rlhf import runs
from tests.tiny import built
from tests.trainer import tiny

WIDER = tiny.LLAMA | {"dim": 64}


class OtherTokenizer(ByteTokenizer):
    """As many tokens, which mean something else."""

    fingerprint = "other"


def judge(vocab_size: int = ByteTokenizer.vocab_size) -> ValueHeadModel:
    model = ValueHeadModel(built(tiny.LLAMA, vocab_size))
    model.reset_head(0)
    return model


def run_of(tokenizer: Any, model: nn.Module) -> Run:
    return Run(folder=Path("nowhere"), model=model, processor=tokenizer, metrics={})


def test_a_reward_model_of_another_tokenizer_reads_text() -> None:
    other = run_of(OtherTokenizer(), judge())
    for given in (other, {"letters": runs.letters, "judge": (0.5, other)}):
        runs.begin("ppo", None, roles={"reward": given})


def test_a_critic_does_not_begin_as_a_reward_model_of_other_tokens() -> None:
    for tokenizer, width in ((ByteTokenizer(), 32), (OtherTokenizer(), 64)):
        roles = {"reward": run_of(tokenizer, judge())}
        model = runs.begin("ppo", None, roles=roles, model=runs.network(family=WIDER)).loop.model
        assert cast(ActorCritic, model).critic.score.weight.shape == (1, width)


@pytest.mark.slow
def test_a_reference_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    runs.finish(runs.begin("reward", tmp_path / "reward", {"trainer.max_steps": 1}))
    runs.finish(runs.begin("sft", tmp_path / "sft", {"trainer.max_steps": 1}))
    reward, reference = str(tmp_path / "reward"), str(tmp_path / "sft")
    runs.begin("grpo", None, {"reward": reward, "reference": reference}, roles={})
    runs.begin("grpo", None, {"reward": reward}, roles={}, processor=OtherTokenizer())
    for choices, roles in (
        ({"reference": reference}, {"reward": runs.letters}),
        ({}, {"reward": runs.letters, "reference": reference}),
    ):
        with pytest.raises(ConfigError, match="the role reference has another tokenizer"):
            runs.begin("grpo", None, choices, roles=roles, processor=OtherTokenizer())


@pytest.mark.parametrize("role", ["reward", "reference"])
def test_a_network_that_knows_fewer_tokens_is_refused(role: str) -> None:
    small = judge(200)
    given = {"reward": runs.letters} | {role: small if role == "reward" else small.backbone}
    with pytest.raises(ConfigError, match=rf"(?s)the role {role} is too small.*200.*258"):
        runs.begin("ppo", None, roles=given)


@pytest.mark.parametrize(("model", "rate"), [(runs.Noisy(), 0.3), (runs.network(family=tiny.GPT2 | tiny.DROPOUT), 0.1)])
def test_dropout_is_off_and_the_run_says_so(model: nn.Module, rate: float, tmp_path: Path) -> None:
    choices = {"trainer.max_steps": 1, "trainer.log_every": 1, "kl.coef": 0.0}
    assembly = runs.begin("grpo", tmp_path, choices, model=model)
    runs.finish(assembly)
    assert tiny.events(tmp_path, "dropout") == [f"dropout {rate} of the model is disabled for this task"]
    (record,) = tiny.records(tmp_path, "train")
    assert record["approx_kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_ranks_that_train_or_draw_take_part_and_no_others(
    trains: bool, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr("kitforge.kits.rlhf.roles.placement.sync_weights", lambda *given: calls.append(given))
    world = World(device=torch.device("cpu"))
    fragments = RolePlacement(RoleRanksOptions(rollout=(0, 3)), world)
    model, whole = (nn.Linear(2, 1) if each else None for each in (trains, draws))
    fragments.sync_weights(model, whole)
    assert len(calls) == (trains or draws)
    for parallel, target, ranks, _ in calls:
        assert (parallel is not None) == trains
        assert target is not None and target["weight"] is whole.weight if whole is not None else target is None
        assert ranks == (0, 3)
