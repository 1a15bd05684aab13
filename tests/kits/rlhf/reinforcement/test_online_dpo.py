"""Online DPO: pairs of the policy's own completions, and what becomes of ties."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.rlhf.reinforcement.online_dpo import OnlineDPOTask
from kitforge.kits.rlhf.reinforcement.rollout_batch import Rollout
from tests.kits.rlhf import runs

Choices = Mapping[str, Any]


def begin(choices: Choices | None = None, folder: Path | None = None, **inputs: Any) -> Any:
    inputs = {"model": runs.network(torch.float64)} | inputs
    return runs.begin("online_dpo", folder, {"data.eval_fraction": 0.0} | dict(choices or {}), **inputs)


def first(choices: Choices | None = None, **inputs: Any) -> tuple[OnlineDPOTask, Any, list[Any]]:
    """Task, network and the micro-batches of the first step, in float64."""
    return runs.opened(begin(choices, **inputs))


def groups(task: OnlineDPOTask, size: int = 3) -> list[list[Rollout]]:
    """The completions of each prompt."""
    rollouts = runs.collected(task)
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def log_prob(model: Any, rollout: Rollout) -> Tensor:
    """Of a completion, by whole logits."""
    prompt, said = list(rollout.completion.prompt), torch.tensor(rollout.completion.tokens)
    logits = model(torch.tensor([[*prompt, *said.tolist()]]))[0, len(prompt) - 1 : -1]
    found: Tensor = logits.log_softmax(-1).gather(-1, said.unsqueeze(-1)).sum()
    return found


@pytest.mark.parametrize("size", [1, 3, None])
def test_the_loss_is_that_of_dpo_on_the_best_and_the_worst_completion(size: int | None) -> None:
    reference = runs.network(torch.float64, seed=4)
    task, model, step = first(
        {"trainer.micro_batch_size": size}, roles={"reward": runs.letters, "reference": reference}
    )
    wanted = torch.zeros((), dtype=torch.float64)
    for group in groups(task):
        best, worst = max(group, key=lambda each: each.reward), min(group, key=lambda each: each.reward)
        margins = [log_prob(each, best) - log_prob(each, worst) for each in (model, reference)]
        wanted = wanted - torch.nn.functional.logsigmoid(0.1 * (margins[0] - margins[1]))
    found = torch.stack([task.loss(model, each)["loss"] for each in step]).sum()
    assert float((found - wanted).detach().abs()) < 1e-6
    parameters = list(model.parameters())
    pairs = zip(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters), strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-9
    assert float(task.count(step)["loss"]) == len(groups(task))


def test_ties_are_dropped_and_counted(tmp_path: Path) -> None:
    def reward(*, prompts: list[str], completion_tokens: list[list[int]]) -> list[float]:
        pairs = zip(prompts, completion_tokens, strict=True)
        return [sum(tokens) % 17 if "1" in text else 0.1 for text, tokens in pairs]

    rows = [{"prompt": f"Q{n}"} for n in range(4)]
    # TRL takes the lower index of a tie, and learns from nothing.
    choices = {"trainer.micro_batch_size": 1}
    task, _, step = first(choices, roles={"reward": reward}, train_dataset=rows)
    assert float(task.count(step)["loss"]) == 1
    assert step[0]["metrics"]["frac_ties"] == 0.75
    folder = tmp_path / "run"
    runs.finish(begin({"trainer.max_steps": 2}, folder, roles={"reward": lambda *, prompts: [1.0] * len(prompts)}))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [each for each in lines if each["kind"] == "train"]
    assert [(each["skipped"], each["frac_ties"], "loss" in each) for each in trained] == [(1, 1, False), (2, 1, False)]


def test_penalties_count_before_completions_are_compared() -> None:
    even = {"reward": lambda *, prompts: [1.0] * len(prompts)}
    choices = {"rl.prompts_per_rollout": 12, "rl.num_generations": 8, "rl.missing_eos_penalty": 1.0}
    choices |= {"rollout.max_new_tokens": 20}
    task, _, step = first(choices, roles=even)
    decided = [group for group in groups(task, 8) if 0 < sum(each.completion.is_finished for each in group) < 8]
    assert decided
    assert float(task.count(step)["loss"]) == len(decided)
    for batch in step:
        ends = [bool(row[row >= 0][-1] == ByteTokenizer.eos_id) for row in batch["targets"]]
        assert ends == [True] * (len(ends) // 2) + [False] * (len(ends) // 2)


def test_the_default_reference_is_the_policy_before_training_and_stays(tmp_path: Path) -> None:
    model = runs.network(torch.float64)
    before = copy.deepcopy(model.state_dict())
    assembly = begin({"trainer.max_steps": 3}, tmp_path / "run", model=model)
    runs.finish(assembly)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    trained = [each for each in lines if each["kind"] == "train"]
    assert trained[0]["loss"] == pytest.approx(0.6931, abs=1e-4)
    assert trained[0]["rewards/margins"] == 0 != trained[2]["rewards/margins"]
    assert {"reward", "rewards/accuracy", "frac_ties"} <= trained[0].keys()
