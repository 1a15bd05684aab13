"""The answers of tools and environments, learnt by cross-entropy beside the policy loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ConfigError
from kitforge.foundation.types import IGNORED
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.reinforcement.echo import echo_targets
from kitforge.kits.rlhf.reinforcement.ppo import PolicyGradientTask
from kitforge.kits.rlhf.roles.value_head import policy_of
from kitforge.kits.rlhf.tasks import Inputs, task_inputs_of
from kitforge.models.loading import save
from kitforge.trainer.loop import Loop
from tests.distributed.ranks import run_ranks
from tests.kits.rlhf import runs
from tests.kits.rlhf.test_ranks import Heard
from tests.models.test_parity import exact
from tests.trainer import tiny

COEF = 0.3
ROWS = [{"prompt": f"{n} and {n % 3}: ", "numbers": n} for n in range(8)]
CHOICES = {
    "rollout.max_new_tokens": 5,
    "rollout.max_turns": 3,
    "rollout.temperature": 0.7,
    "rl.num_minibatches": 2,
    "data.sequence_length": 80,
    "data.eval_fraction": 0.0,
}


class Told:
    """Answers of other lengths, so that micro-batches and ranks have other numbers of their tokens."""

    def reset(self, row: Mapping[str, Any]) -> str:
        self.number = row["numbers"]
        return "go: "

    def step(self, response: str) -> tuple[str, float, bool]:
        self.number += 1
        return f" [{'x' * (self.number % 5)}{len(response)}]\n", len(response) / 7, self.number % 4 == 0


def talkative() -> nn.Module:
    """A network in float64 that often ends a turn. A folder has its weights as they are, in fp32."""
    network: Any = runs.network()
    network.output.data[ByteTokenizer.eos_id] += 2 * network.norm.weight.data
    return cast(nn.Module, network.double())


def begin(choices: Mapping[str, Any] | None = None, stage: str = "grpo", model: nn.Module | None = None) -> Any:
    model = model or talkative()
    roles = {"environment": Told}
    return runs.begin(stage, None, CHOICES | dict(choices or {}), model=model, roles=roles, train_dataset=ROWS)


def gradient(choices: Mapping[str, Any], stage: str = "grpo") -> Tensor:
    return runs.gradient(begin(choices, stage))


def heard(task: PolicyGradientTask) -> list[tuple[list[int], list[int]]]:
    """Tokens of each row of a rollout batch, and the positions of what was told between two turns, by its record."""
    found = []
    for rollout in runs.collected(task):
        said, prompt = rollout.completion, rollout.completion.prompt
        first, last = said.loss_mask.index(True), len(said.loss_mask) - 1 - said.loss_mask[::-1].index(True)
        positions = [len(prompt) + at for at in range(first, last) if not said.loss_mask[at]]
        found.append(([*prompt, *said.tokens], positions))
    return found


@pytest.mark.slow
def test_it_adds_the_mean_cross_entropy_of_transformers_on_what_was_told(tmp_path: Path) -> None:
    network = talkative()
    whole = {"rl.num_minibatches": 1, "trainer.micro_batch_size": 3}
    assembly = begin({"rl.echo_coef": COEF} | whole, model=network)
    task, _, step = runs.opened(assembly)
    save(network, tmp_path)
    peer = exact(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, positions in heard(task):
        logits = peer(torch.tensor([tokens])).logits[0]
        where = torch.tensor(positions, dtype=torch.int64)
        total = total + functional.cross_entropy(logits[where - 1], torch.tensor(tokens)[where], reduction="sum")
        count += len(positions)
    sums = [task.loss(assembly.loop.model, each) for each in step]
    assert count == int(task.count(step)["echo_loss"]) > 20
    assert sum(float(each["echo_loss"]) for each in sums) == pytest.approx(float(total.detach()), rel=1e-12)
    (COEF * total / count).backward()
    added = gradient({"rl.echo_coef": COEF} | whole) - gradient(whole)
    shapes = [each.numel() for each in network.parameters()]
    ours = dict(zip([name for name, _ in network.named_parameters()], added.split(shapes), strict=True))
    embedding, head = peer.get_input_embeddings().weight.grad, peer.get_output_embeddings().weight.grad
    assert added.norm() > 1e-2
    torch.testing.assert_close(ours["embedding.weight"].view_as(embedding), embedding, rtol=0, atol=1e-11)
    torch.testing.assert_close(ours["output"].view_as(head), head, rtol=0, atol=1e-11)
    assert float(added.norm()) == pytest.approx(
        float(torch.cat([each.grad.flatten() for each in peer.parameters()]).norm()), rel=1e-10
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "cut"),
    [
        ("ppo", {"trainer.micro_batch_size": 1}),
        ("grpo", {"rl.max_tokens_per_microbatch": 120}),
        ("dr_grpo", {"trainer.micro_batch_size": 3}),
    ],
)
def test_micro_batches_and_shared_prompts_have_the_gradient_of_the_batch(stage: str, cut: dict[str, Any]) -> None:
    whole, parts = (gradient({"rl.echo_coef": COEF} | each, stage) for each in ({}, cut))
    assert float((parts - whole).norm() / whole.norm()) < 1e-10


def test_a_coefficient_of_zero_changes_no_bit_and_logs_nothing() -> None:
    assembly = begin({"rl.echo_coef": 0.0})
    task, model = assembly.loop.task, assembly.loop.model
    step = runs.first_step(task, model)
    assert not any("echo" in name for each in (*step, task.count(step), task.loss(model, step[0])) for name in each)
    assert torch.equal(gradient({"rl.echo_coef": 0.0}), gradient({}))


def test_answers_lie_between_turns_of_rows_that_are_trained_on() -> None:
    # Prompt, opening of the environment, turn, answer, turn, padding.
    own = torch.tensor([[False, False, False, True, True, False, False, True, False, False]])
    tokens = torch.arange(10).unsqueeze(0)
    targets = torch.where(own, tokens + 1, IGNORED)
    found = echo_targets({"tokens": tokens, "targets": targets, "keep_mask": torch.tensor([True])})
    assert found.tolist() == [[IGNORED] * 5 + [6, 7] + [IGNORED] * 3]
    left_out = echo_targets({"tokens": tokens, "targets": targets, "keep_mask": torch.tensor([False])})
    assert (left_out == IGNORED).all()


def trained(_rank: int, degrees: ParallelConfig) -> tuple[Tensor, list[float]]:
    """Weights after two updates, and the echo loss of each."""
    torch.set_num_threads(1)
    world = World(device=torch.device("cpu"), mesh=Mesh(degrees, "cpu") if degrees.world_size > 1 else None)
    choices = runs.OPTIONS | runs.ROUNDS | runs.SHAPED["grpo"] | CHOICES
    choices |= {
        "task": "grpo",
        "rl.echo_coef": COEF,
        "trainer.micro_batch_size": 2,
        "trainer.max_steps": 2,
        "trainer.log_every": 1,
    }
    options = TASKS["grpo"].read_options(tiny.nested(choices))
    model = talkative()
    inputs = Inputs(processor=ByteTokenizer(), model=model, train_dataset=ROWS, roles={"environment": Told})
    task, _ = TASKS["grpo"].build_task(task_inputs_of(options, inputs, world.device)).task(world)
    lines = Heard()
    loop = Loop(task, options, world, callbacks=[lines])
    loop.train()
    weights = [each.detach().flatten() for each in policy_of(loop.model).parameters()]
    return torch.cat(weights), [each["echo_loss"] for each in lines.lines]


@pytest.mark.slow
def test_ranks_equal_one() -> None:
    weights, losses = trained(0, ParallelConfig())
    assert len(losses) == 2
    for found, own in run_ranks(2, trained, ParallelConfig(data=2)):
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-9)
        assert own == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(
    ("stage", "choices", "roles", "named"),
    [
        ("grpo", {"rl.echo_coef": -0.1}, {"environment": Told}, "rl.echo_coef"),
        ("grpo", {"rl.echo_coef": 0.1}, {"reward": runs.letters}, "0 without tools or an environment"),
        ("online_dpo", {"rl.echo_coef": 0.1}, {"reward": runs.letters}, "0 with online_dpo"),
    ],
)
def test_a_coefficient_without_effect_is_refused(
    stage: str, choices: dict[str, Any], roles: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        runs.begin(stage, None, choices, roles=roles)
