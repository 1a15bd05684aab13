"""Stages that train adapters: one base for all roles, and what becomes of it."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kitforge.api import Trainer, pipeline, replay, save_model
from kitforge.cli.main import run
from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.lora import active_lora_config, adapter_tensors
from kitforge.core.nn.quantized import quantized_bits
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.types import Region
from kitforge.kits.network_source import copy_model
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.roles.model_loading import load_policy, open_policy
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel, policy_of
from kitforge.models import loading as model_folder
from kitforge.models.peft import load_adapter, save_adapter
from tests.kits.rlhf import runs
from tests.trainer import tiny

SMALL = {"lora.rank": 2}
TOKENS = torch.arange(9).unsqueeze(0)
CPU = torch.device("cpu")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(TOKENS)
    return found


def storages(*networks: nn.Module) -> dict[int, int]:
    """The bytes of every tensor that the networks hold, once each."""
    every: Iterable[nn.Parameter] = (each for network in networks for each in network.parameters())
    return {each.data_ptr(): each.nbytes for each in every}


def test_an_adapter_moves_no_bias_of_the_experts_below_it(tmp_path: Path) -> None:
    family = {**tiny.LLAMA, "family": "mixtral", "experts": {"num_experts": 4, "top_k": 2, "balance": "bias"}}
    base = runs.network(family=family)
    before = {name: each.clone() for name, each in base.named_parameters()}
    runs.finish(runs.begin("sft", tmp_path, SMALL, model=base))
    assert all(torch.equal(each, before[name]) for name, each in base.named_parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kind"),
    [*((stage, "lora") for stage in ("sft", "dpo", "grpo", "ppo")), ("sft", "dora"), ("ppo", "dora")]
    + [("reward", "qlora"), ("dpo", "qlora")],
)
def test_every_task_trains_every_kind_of_adapter(stage: str, kind: str, tmp_path: Path) -> None:
    base = runs.network()
    before, weights = logits(base), [each.clone() for each in base.parameters()]
    choices = SMALL | {"lora.kind": kind, "optimizer.learning_rate": 1e-2}
    assembly = runs.begin(stage, tmp_path, choices, model=base)
    runs.finish(assembly)
    model = assembly.loop.model
    trained = model.backbone if isinstance(model, ValueHeadModel) else policy_of(model)
    assert cast(Any, active_lora_config(trained)).kind == ("dora" if kind == "dora" else "lora")
    assert quantized_bits(trained) == (4 if kind == "qlora" else None)
    # The model that was given is as it was, and not quantized.
    assert all(torch.equal(each, old) for each, old in zip(base.parameters(), weights, strict=True))
    assert torch.equal(logits(base), before)
    ups = [factors[1] for factors in adapter_tensors(trained, "reward" if stage == "reward" else "policy").values()]
    assert any(bool(up.any()) for up in ups)
    if stage != "reward":
        assert not torch.allclose(logits(trained), before, atol=1e-4)
        # From its folder it comes with the adapter within its weights, ready for any use.
        assert torch.allclose(logits(load_policy(tmp_path, CPU)), logits(trained), atol=2e-5)
        assert all(each.requires_grad for each in load_policy(tmp_path, CPU).parameters())
        save_model(tmp_path, tmp_path / "merged")
        assert torch.allclose(logits(model_folder.load(tmp_path / "merged", device=CPU)), logits(trained), atol=2e-5)


@pytest.mark.slow
def test_four_roles_stand_on_one_base() -> None:
    policy = runs.network()
    judged = runs.begin("reward", None, SMALL, model=policy)
    runs.finish(judged)
    judge = cast(ValueHeadModel, judged.loop.model)
    assembly = runs.begin("ppo", None, SMALL, model=policy, roles={"reward": judge})
    model = cast(ActorCritic, assembly.loop.model)
    reference = cast(Any, cast(PolicyGradientTask, assembly.loop.task)._collector)._roles.reference_model.model
    assert reference is policy
    base = sum(storages(policy).values())
    together = sum(storages(model.policy, model.critic, reference, judge).values())
    assert together - base == sum(
        each.nbytes for part in (model, judge) for each in part.parameters() if each.requires_grad
    )
    tokens = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        assert torch.allclose(model.critic(tokens), judge.normalized(judge(tokens)), atol=1e-6)
    runs.finish(assembly)
    assert active_lora_config(model.critic.backbone) == active_lora_config(judge.backbone)


def test_the_next_stage_begins_with_what_the_last_one_learnt() -> None:
    taught = runs.begin("sft", None, SMALL)
    runs.finish(taught)
    for choices in (SMALL, {}):
        following = runs.begin("dpo", None, choices, model=taught.loop.model)
        assert torch.allclose(logits(following.loop.model), logits(taught.loop.model), atol=1e-5)
        assert all(not bool(up.any()) for _, up in adapter_tensors(following.loop.model, "policy").values())


def test_an_adapter_goes_out_to_a_folder_and_comes_back(tmp_path: Path) -> None:
    base = runs.network()
    taught = runs.begin("sft", tmp_path / "sft", SMALL, model=base)
    runs.finish(taught)
    model = cast(Decoder, taught.loop.model)
    folder = tmp_path / "sft" / "adapter"
    fresh = cast(Decoder, runs.network())
    load_adapter(fresh, "mine", folder)
    assert torch.equal(logits(fresh), logits(model))
    again = runs.begin("grpo", None, SMALL | {"lora.path": str(folder)}, model=base)
    reference = cast(Any, cast(PolicyGradientTask, again.loop.task)._collector)._roles.reference_model.model
    assert torch.equal(logits(again.loop.model), logits(model))
    assert torch.equal(logits(reference), logits(model))
    with pytest.raises(ConfigError, match="rank=2"):
        runs.begin("grpo", None, {"lora.rank": 3, "lora.path": str(folder)}, model=base)
    save_adapter(model, adapter_tensors(model, "policy"), cast(Any, active_lora_config(model)), tmp_path / "same")
    assert (tmp_path / "same" / "adapter_config.json").read_bytes() == (folder / "adapter_config.json").read_bytes()


def test_a_reward_models_adapter_goes_out_with_its_head_and_comes_back_into_its_role(tmp_path: Path) -> None:
    base = runs.network()
    judged = runs.begin("reward", tmp_path / "reward", SMALL, model=base)
    runs.finish(judged)
    judge, folder = cast(ValueHeadModel, judged.loop.model), tmp_path / "reward" / "adapter"
    page = json.loads((folder / "adapter_config.json").read_text())
    assert (page["task_type"], page["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "base_model.model.score.weight" in TensorFile(folder / "adapter_model.safetensors", ModelError).names()
    assert float(judge.deviation) != 1.0
    for choices, roles in (({}, {"reward": folder}), ({"reward": str(folder)}, {})):
        following = runs.begin("ppo", None, choices, model=base, roles=roles)
        read = cast(Any, cast(PolicyGradientTask, following.loop.task)._collector)._roles.scorer.model
        assert torch.equal(scores(read), scores(judge))
        # Its matrices are those of the policy that was given, in the same memory.
        assert sum(storages(base, read).values()) - sum(storages(base).values()) < sum(storages(base).values()) / 10
    again = runs.begin("reward", None, SMALL | {"lora.path": str(folder)}, model=base)
    assert torch.equal(scores(cast(ValueHeadModel, again.loop.model)), scores(judge))
    with pytest.raises(ModelError, match="of a reward model"):
        runs.begin("sft", None, SMALL | {"lora.path": str(folder)}, model=base)
    runs.finish(runs.begin("sft", tmp_path / "sft", SMALL, model=base))
    with pytest.raises(ModelError, match="no reward model here"):
        runs.begin("ppo", None, model=base, roles={"reward": tmp_path / "sft" / "adapter"})


def scores(model: ValueHeadModel) -> Tensor:
    with torch.no_grad():
        return model.normalized(model(TOKENS))


@pytest.mark.parametrize("stage", ["reward", "dpo", "ppo"])
def test_adapters_do_not_go_on_beside_other_weights(stage: str, tmp_path: Path) -> None:
    choices = SMALL | {"trainer.max_steps": 1}
    runs.finish(runs.begin(stage, tmp_path, choices))
    other = runs.network()
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    before = [each.clone() for each in other.parameters()]
    further = SMALL | {"trainer.max_steps": 2, "resume": "auto", "trainer.allow_config_changes": True}
    with pytest.raises(ConfigError, match=r"(?s)base weights changed.*got:.*expected:.*do:"):
        runs.finish(runs.begin(stage, tmp_path, further, model=other))
    assert all(torch.equal(each, old) for each, old in zip(other.parameters(), before, strict=True))


@pytest.mark.slow
def test_a_step_of_adapters_is_replayed_to_the_last_bit(tmp_path: Path) -> None:
    choices = SMALL | {"trainer.max_steps": 2, "trainer.checkpoint_every": 1, "trainer.log_every": 1}
    runs.finish(runs.begin("grpo", tmp_path, choices))
    assert replay(tmp_path, 2, {"device": "cpu"}).is_same


@pytest.mark.slow
def test_a_run_of_adapters_writes_text_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assembly = runs.begin("sft", tmp_path / "run", SMALL)
    runs.finish(assembly)
    options = {"inference.temperature": 0, "inference.max_new_tokens": 8, "device": "cpu"}
    opened = pipeline("text_generation", assembly.loop.model, ByteTokenizer(), options)
    (wanted,), (found,) = opened("Q1: "), pipeline("text_generation", tmp_path / "run", options=options)("Q1: ")
    assert found == wanted
    arguments = [f"{name}={value}" for name, value in options.items()]
    assert run(["generate", "checkpoint=run", "prompt=Q1: ", *arguments]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == wanted["generated_text"]
    Path("prompts.jsonl").write_text('{"prompt": "Q1: "}\n')
    assert run(["generate", "checkpoint=run", "data.eval=prompts.jsonl", "output=answers.jsonl", *arguments]) == 0
    assert "Q1: " + json.loads(Path("answers.jsonl").read_text())["generated_text"] == wanted["generated_text"]
    capsys.readouterr()
    Path("who.jsonl").write_text('{"query": "Q1: ", "choices": ["yes ", "zzzz"], "gold": 0}\n')
    assert run(["evaluate", "checkpoint=run", "tasks=[who.jsonl]", "device=cpu"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["who/questions"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "choices"), [("sft", SMALL), ("ppo", {})])
def test_the_policy_of_a_run_goes_on_as_a_plain_language_model(
    stage: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    stopped = runs.begin(stage, tmp_path / "run", choices | {"trainer.max_steps": 1})
    runs.finish(stopped)
    options = {"data.sequence_length": 16, "data.batch_size": 2, "trainer.progress": False, "device": "cpu"}
    text = ["yes yes yes no " * 8] * 4

    def plain(model: Any, **further: Any) -> Trainer:
        return Trainer("text_generation", model, text, text, options=options | further, output_dir=tmp_path / "plain")

    wanted = plain(policy_of(stopped.loop.model)).evaluate()["eval/loss"]
    assert plain(tmp_path / "run").evaluate()["eval/loss"] == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted - plain(runs.network()).evaluate()["eval/loss"]) > 1e-4
    after = plain(tmp_path / "run", **{"trainer.max_steps": 1, "optimizer.learning_rate": 1e-12}).train()
    assert after.metrics["eval/loss"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(("stage", "choices"), [("sft", {}), ("ppo", SMALL)])
def test_a_run_is_exported_from_file_to_file_with_its_adapter_in_its_weights(
    stage: str, choices: dict[str, Any], tmp_path: Path
) -> None:
    runs.finish(assembly := runs.begin(stage, tmp_path / "run", choices | {"trainer.max_steps": 1}))
    policy = copy_model(policy_of(assembly.loop.model), CPU)
    save_model(policy, tmp_path / "memory", ByteTokenizer(), "float32")
    # No network is made on the way.
    with mock.patch.object(model_folder, "materialize", side_effect=AssertionError("memory was made")):
        save_model(tmp_path / "run", tmp_path / "streamed", dtype="float32")
    files = sorted(path.name for path in (tmp_path / "memory").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "streamed").iterdir())
    for name in files:
        assert (tmp_path / "streamed" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()


def test_a_part_of_a_policy_is_that_part_of_the_whole(tmp_path: Path) -> None:
    """Also where an adapter adds to it."""
    runs.finish(runs.begin("sft", tmp_path, SMALL | {"trainer.max_steps": 1}))
    stored = open_policy(tmp_path)
    for name in stored.names:
        whole = stored.read(name, None)
        rows = whole.shape[0] // 2
        region = Region(
            global_shape=(*whole.shape,), offset=(rows, *[0] * (whole.dim() - 1)), shape=(*whole[rows:].shape,)
        )
        assert torch.equal(stored.read(name, region), whole[rows:])


def test_a_reward_model_is_no_language_model(tmp_path: Path) -> None:
    runs.finish(runs.begin("reward", tmp_path, SMALL | {"trainer.max_steps": 1}))
    with pytest.raises(ModelError, match=r"(?s)holds no language model.*a reward model in.*expected:"):
        Trainer("text_generation", tmp_path, ["yes"] * 4, options={"device": "cpu"}).train()
