"""Networks of one stage read the same tokens, and none of them has dropout where they are compared."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel
from kitforge.models.catalog import config_of
from kitforge.models.loading import build
from kitforge.trainer.run_folder import Run
from tests.kits.rlhf import runs
from tests.trainer import tiny

WIDER = tiny.LLAMA | {"dim": 64}


class OtherTokenizer(ByteTokenizer):
    """As many tokens, which mean something else."""

    fingerprint = "other"


def judge(vocab_size: int = ByteTokenizer.vocab_size) -> ValueHeadModel:
    model = ValueHeadModel(
        build(config_of(tiny.LLAMA | {"vocab_size": vocab_size}), device=torch.device("cpu"), seed=3)
    )
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
