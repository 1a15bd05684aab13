"""Text that a policy must not forget, beside its answers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.foundation.errors import ConfigError
from kitforge.kits.rlhf.roles.value_head import policy_of
from tests.kits.rlhf import runs
from tests.trainer import tiny

TEXTS = [{"text": "so it is " * (n % 3 + 1)} for n in range(10)]
MIXED = {"ptx.coef": 0.5, "ptx.batch_size": 5}
SHORT = {"rl.num_minibatches": 2, "data.shuffle": False}


def gradient(stage: str, choices: Mapping[str, Any], **roles: Any) -> Tensor:
    roles = {"reward": runs.letters} | roles
    return runs.gradient(runs.begin(stage, None, choices, model=runs.network(torch.float64), roles=roles))


@pytest.mark.parametrize("stage", ["ppo", "grpo", "rloo"])
def test_it_adds_its_weight_times_the_mean_over_its_tokens(stage: str) -> None:
    assembly = runs.begin(stage, None, SHORT, model=runs.network(torch.float64))
    network = policy_of(assembly.loop.model)
    mixed = runs.begin(
        stage, None, SHORT | MIXED, model=runs.network(torch.float64), roles={"reward": runs.letters, "ptx": TEXTS}
    )
    step = runs.first_step(mixed.loop.task, mixed.loop.model)
    rows = [each for each in step if "ptx_weight" in each]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, learnt in (
        (row, learnt) for each in rows for row, learnt in zip(each["tokens"], each["targets"], strict=True)
    ):
        log_probs = network(row.unsqueeze(0))[0].log_softmax(-1)
        where = learnt >= 0
        total = total - log_probs[where].gather(-1, learnt[where].unsqueeze(-1)).sum()
        count += int(where.sum())
    found = torch.autograd.grad(0.5 * total / count, list(network.parameters()))
    added = gradient(stage, SHORT | MIXED, ptx=TEXTS) - gradient(stage, SHORT)
    wanted = torch.cat([each.flatten() for each in found])
    assert count == int(mixed.loop.task.count(step)["ptx_loss"])
    # A critic, behind the policy, is left alone.
    assert torch.allclose(added[: len(wanted)], wanted, atol=1e-10)
    assert not added[len(wanted) :].any()


@pytest.mark.parametrize("cut", [{"trainer.micro_batch_size": 2}, {"rl.max_tokens_per_microbatch": 40}])
def test_micro_batches_have_the_gradient_of_the_batch(cut: dict[str, Any]) -> None:
    whole, parts = (gradient("ppo", SHORT | MIXED | choices, ptx=TEXTS) for choices in ({}, cut))
    assert float((parts - whole).norm() / whole.norm()) < 1e-10


def test_rows_come_from_a_file_and_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, TEXTS)))
    often = {"trainer.checkpoint_every": 1, "trainer.save_total_limit": 9, "rl.epochs": 2}
    choices = MIXED | often | {"ptx.data": str(file)}
    runs.finish(runs.begin("ppo", tmp_path / "whole", choices))
    folder = tiny.copy_up_to(tmp_path / "whole", tmp_path / "killed", 3)
    runs.finish(runs.begin("ppo", folder, choices | {"resume": "auto"}))
    tiny.assert_same(folder, tmp_path / "whole")
    file.write_text("\n".join(map(json.dumps, TEXTS[1:])))
    with pytest.raises(ConfigError, match="training rows"):
        runs.finish(runs.begin("ppo", folder, choices | {"resume": "auto"}))


def test_while_the_critic_warms_up_the_policy_stays() -> None:
    policy = runs.network()
    choices = MIXED | {"rl.critic_warmup": 1, "trainer.max_steps": 1, "optimizer.weight_decay": 0.1}
    assembly = runs.begin("ppo", None, choices, model=policy, roles={"reward": runs.letters, "ptx": TEXTS})
    runs.finish(assembly)
    pairs = zip(policy_of(assembly.loop.model).parameters(), policy.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
