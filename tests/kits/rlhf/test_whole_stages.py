"""What the stages that learn from rows log, and the weights they end with, equal those found row by row from the
papers, with an Adam of its own, whatever their options."""

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.roles.model_loading import load_reward_model
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from tests.kits.rlhf import runs
from tests.kits.rlhf.reinforcement.plain_round import PlainAdam
from tests.trainer import tiny

DEMONSTRATIONS = [{"prompt": f"Q{n}: ", "completion": "yes " * (n % 3 + 1)} for n in range(6)]
PAIRS = [
    {"prompt": f"Q{n}: ", "chosen": "yes" * (n % 3 + 1), "rejected": "no" * (n % 2 + 1), "margin": n / 10}
    for n in range(6)
]
JUDGED = [{"prompt": "Q" * (n + 1), "completion": "yes no "[: 7 - n], "label": n % 3 != 1} for n in range(6)]
COMMON: dict[str, Any] = {
    "data.eval_fraction": 0.0,
    "data.shuffle": False,
    "data.batch_size": 6,
    "data.sequence_length": 24,
    "trainer.max_steps": 3,
    "trainer.max_grad_norm": 0.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.learning_rate": 1e-3,
    "optimizer.eps": 1e-5,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {}),
    ("sft", {"packing": False, "trainer.micro_batch_size": 4}),
    ("reward", {"reward.center_coefficient": 0.3, "trainer.micro_batch_size": 4}),
    ("reward", {"reward.use_margins": False, "reward.center_coefficient": 0.0}),
    ("dpo", {"preference.beta": 0.3}),
    ("dpo", {"preference.label_smoothing": 0.2, "trainer.micro_batch_size": 4}),
    ("dpo", {"preference.rpo_alpha": 0.7}),
    ("ipo", {"preference.beta": 0.4}),
    ("simpo", {"preference.beta": 2.0, "preference.simpo_gamma": 0.8}),
    ("orpo", {"preference.orpo_lambda": 0.6}),
    ("kto", {"kto.desirable_weight": 1.5, "kto.undesirable_weight": 0.5, "kto.beta": 0.3}),
    # Answers of one row behind the prompt of another are cut here.
    ("kto", {"data.sequence_length": 9, "trainer.micro_batch_size": 4}),
]


def spoken(network: Any, prompt: str, completion: str, longest: int | None = None) -> tuple[Tensor, int]:
    """The log-probability of a completion with its end, and how many tokens it has; of prompt and completion at most
    `longest` tokens are left."""
    text, start = [*prompt.encode(), *completion.encode(), ByteTokenizer.eos_id], len(prompt.encode())
    text = text[:longest]
    every = network(torch.tensor([text]))[0, start - 1 : -1].log_softmax(-1)
    return every.gather(-1, torch.tensor(text[start:]).unsqueeze(-1)).sum(), len(text) - start


def loss_of_demonstrations(policy: Any, _: Any, options: Any) -> Tensor:
    found = [spoken(policy, row["prompt"], row["completion"]) for row in DEMONSTRATIONS]
    return -torch.stack([total for total, _ in found]).sum() / sum(size for _, size in found)


def loss_of_scores(model: Any, _: Any, options: Any) -> Tensor:
    losses = []
    for row in PAIRS:
        texts = [
            [*row["prompt"].encode(), *row[name].encode(), ByteTokenizer.eos_id] for name in ("chosen", "rejected")
        ]  # type: ignore[attr-defined]
        good, bad = (model(torch.tensor([text]))[0, -1] for text in texts)
        margin = row["margin"] if options.reward.use_margins else 0.0
        losses.append(-logsigmoid(good - bad - margin) + options.reward.center_coefficient * (good + bad) ** 2)
    return torch.stack(losses).mean()


def loss_of_pairs(policy: Any, reference: Any, options: Any) -> Tensor:
    o, losses = options.preference, []
    for row in cast(list[dict[str, str]], PAIRS):
        (good, long), (bad, short) = (spoken(policy, row["prompt"], row[name]) for name in ("chosen", "rejected"))
        with torch.no_grad():
            kept, dropped = (spoken(reference, row["prompt"], row[name])[0] for name in ("chosen", "rejected"))
        if o.loss == "dpo":
            margin = o.beta * (good - bad - kept + dropped)
            label = (1 - o.label_smoothing) * logsigmoid(margin) + o.label_smoothing * logsigmoid(-margin)
            losses.append(-label - o.rpo_alpha * good / long)
        elif o.loss == "ipo":
            losses.append(((good - kept) / long - (bad - dropped) / short - 1 / (2 * o.beta)) ** 2)
        elif o.loss == "simpo":
            losses.append(-logsigmoid(o.beta * (good / long - bad / short) - o.simpo_gamma))
        else:
            odds = [mean - torch.log1p(-mean.exp()) for mean in (good / long, bad / short)]
            losses.append(-good / long - o.orpo_lambda * logsigmoid(odds[0] - odds[1]))
    return torch.stack(losses).mean()


def loss_of_verdicts(policy: Any, reference: Any, options: Any) -> Tensor:
    o, rows = options.kto, cast(list[dict[str, Any]], JUDGED)
    with torch.no_grad():
        crossed = [
            [
                spoken(network, row["prompt"], rows[n - 1]["completion"], options.data.sequence_length)[0]
                for network in (policy, reference)
            ]
            for n, row in enumerate(rows)
        ]
        baseline = max(0.0, sum(float(own - frozen) for own, frozen in crossed) / len(rows))
        frozen = [spoken(reference, row["prompt"], row["completion"])[0] for row in rows]
    losses = []
    for row, before in zip(rows, frozen, strict=True):
        ratio = spoken(policy, row["prompt"], row["completion"])[0] - before
        sign, weight = (1, o.desirable_weight) if row["label"] else (-1, o.undesirable_weight)
        losses.append(weight * (1 - torch.sigmoid(sign * o.beta * (ratio - baseline))))
    return torch.stack(losses).mean()


LOSSES = {"sft": (loss_of_demonstrations, DEMONSTRATIONS), "kto": (loss_of_verdicts, JUDGED)}
LOSSES |= {"reward": (loss_of_scores, PAIRS)} | dict.fromkeys(("dpo", "ipo", "simpo", "orpo"), (loss_of_pairs, PAIRS))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "choices"), CASES, ids=lambda each: each if isinstance(each, str) else json.dumps(each)
)
def test_a_step_is_that_of_the_papers(stage: str, choices: Mapping[str, Any], tmp_path: Path) -> None:
    loss, rows = LOSSES[stage]
    network = runs.network(torch.float64)
    assembly = runs.begin(stage, tmp_path, COMMON | dict(choices), model=network, train_dataset=rows)
    plain, reference = copy.deepcopy(assembly.loop.model), copy.deepcopy(network)
    parameters = [each for each in plain.parameters() if each.requires_grad]
    adam, wanted = PlainAdam(parameters, assembly.options.optimizer), []
    runs.finish(assembly)
    for _ in range(3):
        total = loss(plain, reference, assembly.options)
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        norm = math.sqrt(sum(float((each**2).sum()) for each in gradients if each is not None))
        wanted.append({"loss": total.item(), "grad_norm": norm})
        adam.step(gradients)
    lines = [line for line in tiny.records(tmp_path) if line["kind"] == "train"]
    # Scores of reward models are compared in fp32.
    tolerance = 1e-5 if stage == "reward" else 1e-8
    for found, each in zip(lines, wanted, strict=True):
        assert {name: found[name] for name in each} == pytest.approx(each, rel=tolerance, abs=tolerance)
    trained = [each for each in assembly.loop.model.parameters() if each.requires_grad]
    assert all(torch.allclose(*pair, rtol=0, atol=tolerance) for pair in zip(trained, parameters, strict=True))


@pytest.mark.slow
def test_every_checkpoint_of_a_reward_model_holds_the_mean_and_deviation_of_its_scores(tmp_path: Path) -> None:
    choices = {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 9, "trainer.max_steps": 3}
    runs.finish(runs.begin("reward", tmp_path, choices | {"data.eval_fraction": 0.0}))
    for step in (1, 2, 3):
        model = cast(ValueHeadModel, load_reward_model(tmp_path / "checkpoints" / f"step_{step}", torch.device("cpu")))
        scores = []
        for row in cast(list[dict[str, str]], runs.PAIRS):
            for name in ("chosen", "rejected"):
                text = [*row["prompt"].encode(), *row[name].encode(), ByteTokenizer.eos_id]
                scores.append(model(torch.tensor([text]))[0, -1].item())
        found = torch.tensor(scores, dtype=torch.float64)
        assert float(model.mean) == pytest.approx(float(found.mean()), abs=1e-5)
        assert float(model.deviation) == pytest.approx(float(found.std(unbiased=False)), rel=1e-4)


def test_the_best_evaluation_of_a_policy_is_that_of_the_largest_reward(tmp_path: Path) -> None:
    assembly = runs.begin("reinforce_pp", tmp_path, {"trainer.max_steps": 3, "trainer.eval_every": 1})
    rewards = iter((0.2, 0.6, 0.4))
    evaluate = assembly.loop.task.evaluate
    with mock.patch.object(
        PolicyGradientTask, "evaluate", lambda _, model: evaluate(model) | {"eval/reward": next(rewards)}
    ):
        metrics = runs.finish(assembly)
    assert "eval/loss" not in metrics
    state = assembly.loop.state
    assert (state.best_value, state.best_step) == (0.6, 2)


def test_the_metric_that_is_named_says_which_evaluation_of_a_policy_is_the_best() -> None:
    for choices, wanted in (
        ({}, ("eval/reward", "max")),
        ({"trainer.metric_for_best": "eval/completion/mean_length"}, ("eval/completion/mean_length", "min")),
        (
            {"trainer.metric_for_best": "eval/completion/eos_rate", "trainer.metric_for_best_mode": "max"},
            ("eval/completion/eos_rate", "max"),
        ),
        ({"trainer.metric_for_best_mode": "min"}, ("eval/reward", "min")),
    ):
        options = runs.begin("reinforce_pp", None, choices).loop.options
        assert (options.metric_for_best, options.metric_for_best_mode) == wanted
