"""Learning from rewards: what holds before the first update, what every answer counts for, and that it learns."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.nn import shared_prefix
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.shared_prefix import PrefixTree, SharedPrefixAttend
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import CheckpointError
from kitforge.foundation.types import MicroBatch
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import RolloutBatch, target_logprobs
from kitforge.kits.rlhf.roles.value_head import ActorCritic, ValueHeadModel, policy_of
from tests.kits.rlhf import runs
from tests.trainer import tiny

FLAT = {"data.eval_fraction": 0.0}


def first(
    stage: str, choices: Mapping[str, Any] | None = None, **inputs: Any
) -> tuple[PolicyGradientTask, nn.Module, MicroBatch]:
    """Task, network and the first micro-batch, in float64."""
    assembly = runs.begin(stage, None, choices, model=runs.network(torch.float64), **inputs)
    task, model, (batch, *_) = runs.opened(assembly)
    return task, model, batch


@pytest.mark.parametrize("stage", runs.RL)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_before_the_first_update_ratios_are_one_and_nothing_is_away(stage: str, temperature: float) -> None:
    task, model, batch = first(stage, {"rollout.temperature": temperature, "kl.coef": 0.0, "kl.measure": True})
    sums = task.loss(model, batch)
    assert float(sums["clip_fraction"]) == 0
    assert abs(float(sums["approx_kl"])) < 1e-10
    with torch.no_grad():
        found, _ = target_logprobs(policy_of(model), batch["tokens"], batch["targets"], temperature)
    assert float((found - batch["old_logprobs"]).abs().max()) < 1e-10
    assert abs(batch["metrics"]["kl"]) < 1e-10
    gradient = torch.autograd.grad(sums["loss"], list(policy_of(model).parameters()), allow_unused=True)
    wanted = torch.autograd.grad(reinforce(model, batch, temperature, stage), list(policy_of(model).parameters()))
    pairs = [(found, each) for found, each in zip(gradient, wanted, strict=True) if found is not None]
    assert max(float((found - each).abs().max()) for found, each in pairs) < 1e-10 * float(wanted[0].abs().max() + 1)


def reinforce(model: nn.Module, batch: MicroBatch, temperature: float, stage: str) -> Tensor:
    """Minus the advantages times log-probabilities, by plain logits."""
    targets, mask = batch["targets"].clamp(min=0), batch["targets"] >= 0
    log_probs = (cast(CausalLM, policy_of(model))(batch["tokens"]) / temperature).log_softmax(-1)
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    losses = torch.where(mask & batch["keep_mask"].unsqueeze(-1), -batch["advantages"] * chosen, 0.0)
    if runs.SHAPED[stage].get("rl.loss_aggregation") == "seq-mean-token-mean":
        losses = losses / mask.sum(-1, keepdim=True).clamp(min=1)
    return losses.sum()


def test_the_end_of_an_answer_is_learnt_though_the_same_number_fills_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    # microsoft/DeepSpeedExamples, DeepSpeed-Chat: pad == eos, so the mask by number hides the action that ends.
    monkeypatch.setattr(ByteTokenizer, "pad_id", ByteTokenizer.eos_id)
    model = runs.network()
    cast(Any, model).output.data[ByteTokenizer.eos_id] += 3 * cast(Any, model).norm.weight.data
    choices = {"rl.prompts_per_rollout": 16, "rollout.max_new_tokens": 8}
    _, _, (batch,) = runs.opened(runs.begin("reinforce_pp", None, choices, model=model))
    assert batch["metrics"]["completion/eos_rate"] > 0
    ends = (batch["targets"] == ByteTokenizer.eos_id).sum(-1)
    assert float(ends.float().mean()) == pytest.approx(batch["metrics"]["completion/eos_rate"])


def test_the_answers_of_a_prompt_do_not_depend_on_what_else_is_asked() -> None:
    (_, _, many), (_, _, few) = (
        first("reinforce_pp", FLAT | {"rl.prompts_per_rollout": size, "data.shuffle": False}) for size in (4, 2)
    )
    found = {tuple(row[row >= 0].tolist()) for row in many["targets"]}
    assert {tuple(row[row >= 0].tolist()) for row in few["targets"]} <= found


def test_an_adaptive_coefficient_moves_and_is_remembered() -> None:
    choices = {"kl.target": 1e-3, "trainer.max_steps": 3}
    assembly = runs.begin("ppo", None, choices)
    runs.finish(assembly)
    state = assembly.loop.task.state()
    assert state["controller"]["coefficient"] != pytest.approx(0.05)
    fresh = runs.begin("ppo", None, choices)
    fresh.loop.task.load_state(state)
    assert fresh.loop.task.state()["controller"] == state["controller"]


def test_an_open_round_lies_beside_the_state_bit_for_bit(tmp_path: Path) -> None:
    assembly = runs.begin("ppo", tmp_path, {"rl.epochs": 2, "trainer.max_steps": 1})
    runs.finish(assembly)
    step, round_ = tmp_path / "checkpoints" / "step_1", assembly.loop.task.state()["round"]
    found = find_checkpoint(step)
    assert found is not None and found.state["task"]["round"]["metrics"] == round_["metrics"]
    stored = load_file(step / "state.safetensors")
    assert {name.rpartition(".")[2] for name in stored} == set(round_) - {"metrics"}
    for name, tensor in stored.items():
        own = name.rpartition(".")[2]
        assert torch.equal(tensor, round_[own])
        assert torch.equal(getattr(RolloutBatch.from_dict(found.state["task"]["round"]), own), tensor)
    # No number of a token is spelt out.
    assert (step / "state.json").stat().st_size < 20_000
    whole = (step / "state.safetensors").read_bytes()
    (step / "state.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"state\.safetensors is damaged"):
        find_checkpoint(step)
    (step / "state.safetensors").write_bytes(whole[:99])
    with pytest.raises(CheckpointError, match=r"state\.safetensors cannot be read"):
        find_checkpoint(step, verify=False)
    (step / "state.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"state\.safetensors is missing"):
        find_checkpoint(step)


def test_micro_batches_are_cut_by_tokens(tmp_path: Path) -> None:
    choices = {"rl.prompts_per_rollout": 8, "rl.max_tokens_per_microbatch": 32}
    assembly = runs.begin("ppo", tmp_path, choices | {"trainer.max_steps": 1})
    step = runs.first_step(assembly.loop.task, assembly.loop.model)
    assert all(each["tokens"].numel() <= 32 for each in step)
    assert 1 < len(step) < 8
    assert sum(len(each["tokens"]) for each in step) == 8
    runs.finish(assembly)
    words = "rollout batch: 8 prompts x 1 = 8 completions; 1 epochs x 1 minibatches = 1 updates of 8 completions"
    (told,) = tiny.events(tmp_path, "run")
    assert f"{words}, at most 32 tokens per micro-batch; starts from weights: learning rate 0.01" in told


def shared_tree(context: Context) -> PrefixTree | None:
    return context.attend.tree if isinstance(context.attend, SharedPrefixAttend) else None


def test_no_network_reads_an_answer_twice_but_the_one_that_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Counter[tuple[int, str]] = Counter()
    hidden = Decoder.hidden

    def counted(network: Decoder, tokens: Tensor, context: Context | None = None) -> Tensor:
        tree = None if context is None else shared_tree(context)
        is_drawn = context is not None and tree is None
        how = "trained" if torch.is_grad_enabled() else "drawn" if is_drawn else "looked at"
        rows[id(network), how] += len(tokens if tree is None else tree.nodes)
        return hidden(network, tokens, context)

    monkeypatch.setattr(Decoder, "hidden", counted)
    reference, judge = cast(Decoder, runs.network()), ValueHeadModel(runs.network())
    assembly = runs.begin("ppo", None, model=reference, roles={"reward": judge})
    runs.gradient(assembly)
    model = cast(ActorCritic, assembly.loop.model)
    found = {
        (name, how): rows[id(network), how]
        for name, network in {
            "policy": model.policy,
            "critic": model.critic.backbone,
            "reference": reference,
            "judge": judge.backbone,
        }.items()
        for how in ("looked at", "trained")
    }
    answers = {"looked at": ("critic", "reference", "judge"), "trained": ("policy", "critic")}
    assert found == {(name, how): 4 if name in answers[how] else 0 for name, how in found}


def test_passes_over_answers_keep_to_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    widest: dict[int, int] = {}
    hidden = Decoder.hidden

    def measured(network: Decoder, tokens: Tensor, context: Context | None = None) -> Tensor:
        tree = None if context is None else shared_tree(context)
        if context is None or tree is not None:
            widest[id(network)] = max(widest.get(id(network), 0), (tokens if tree is None else tree.nodes).numel())
        return hidden(network, tokens, context)

    monkeypatch.setattr(Decoder, "hidden", measured)
    reference, judge = runs.network(torch.float64), ValueHeadModel(runs.network(torch.float64))
    gradients = []
    for most in (None, 40):
        widest.clear()
        assembly = runs.begin(
            "ppo", None, {"rl.max_tokens_per_microbatch": most}, model=reference, roles={"reward": judge}
        )
        gradients.append(runs.gradient(assembly))
        model = cast(ActorCritic, assembly.loop.model)
        roles = (model.policy, model.critic.backbone, reference, judge.backbone)
        assert all((widest[id(each)] <= 40) == (most is not None) for each in roles)
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-12


@pytest.mark.parametrize("stage", ["grpo", "dapo", "rloo"])
def test_prompts_of_several_answers_are_computed_once(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: Counter[bool] = Counter()
    hidden = Decoder.hidden

    def counted(network: Decoder, each: Tensor, context: Context | None = None) -> Tensor:
        if torch.is_grad_enabled():
            tokens[context is not None] += each.numel()
        return hidden(network, each, context)

    monkeypatch.setattr(Decoder, "hidden", counted)
    choices = {"rl.num_generations": 4, "rl.max_tokens_per_microbatch": 64}
    gradients = []
    for share in (0.0, 0.9):
        monkeypatch.setattr(shared_prefix, "SHARED", share)
        gradients.append(runs.gradient(runs.begin(stage, None, choices, model=runs.network(torch.float64))))
    assert 0 < tokens[True] < 0.6 * tokens[False]
    assert float((gradients[0] - gradients[1]).abs().max()) < 1e-12 * float(gradients[0].abs().max()) + 1e-14


def test_rows_that_are_computed_whole_keep_to_the_token_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    hidden = Decoder.hidden

    def counted(network: Decoder, each: Tensor, context: Context | None = None) -> Tensor:
        if context is None:
            sizes.append(each.numel())
        return hidden(network, each, context)

    monkeypatch.setattr(Decoder, "hidden", counted)
    monkeypatch.setattr(Decoder, "is_compiled", True)
    runs.gradient(runs.begin("grpo", None, {"rl.num_generations": 4, "rl.max_tokens_per_microbatch": 64}))
    assert len(sizes) > 4
    assert max(sizes) <= 64
