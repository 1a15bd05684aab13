"""Several ranks do what one does: the same rows, the same answers, the same weights."""

from typing import Any, final

import pytest
import torch

from kitforge.composition import compose_config, task_of
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.world import World
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.tasks import Inputs, task_inputs_of
from kitforge.trainer.callbacks.callback import Callback, Event, RunContext
from kitforge.trainer.loop import Loop
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.kits.rlhf import runs
from tests.trainer import tiny

CPU = torch.device("cpu")
# Five rows a step, so that ranks have different shares, and answers of a round that two minibatches divide.
CHOICES = {"data.batch_size": 5, "trainer.micro_batch_size": 2, "trainer.max_steps": 2, "data.eval_fraction": 0.3}
# Ranks that draw ahead, each its own part.
AHEAD = {"rollout.max_staleness": 1, "rl.old_logprobs": "recompute", "importance_sampling.mode": "truncate"}
# Micro-batches of ragged sizes, of which ranks have different numbers, and text beside the answers.
CUT = {"trainer.micro_batch_size": None, "rl.max_tokens_per_microbatch": 80, "ptx.coef": 0.5, "ptx.batch_size": 3}
# Whose second update is too far.
TARGET = {"rl.target_kl": 1e-6}
TEXTS = [{"text": "the sea is wide"}, {"text": "a hill"}, {"text": "of towns and woods"}, {"text": "b"}]
STAGES_TRIED: tuple[str, ...] = (*runs.ROWS, *runs.RL, *runs.ON_POLICY)
# Of which some ranks have no row at all.
FOUR: tuple[str, ...] = ("sft", "orpo", "kto", "ppo", "dapo")
if not WHOLE:
    # Ranks of every task are in tests/verify; here what is counted over ranks or stands beside a loss.
    STAGES_TRIED = ("kto", "ppo", "grpo", "dapo", "rloo", "distill")
    FOUR = ("kto", "dapo")


def trained(_rank: int, degrees: ParallelConfig, stages: tuple[str, ...] = STAGES_TRIED) -> dict[str, Any]:
    """Weights and metrics of the stages after two steps, in float64."""
    torch.set_num_threads(1)
    world = World(device=CPU, mesh=Mesh(degrees, "cpu") if degrees.world_size > 1 else None)
    found = {"recipe": trained_by_recipe(world)}
    for stage in stages:
        shaped = (
            runs.SHAPED.get(stage, {})
            | (AHEAD if stage == "ppo" else {})
            | (TARGET if stage == "rloo" else {})
            | (runs.ROUNDS | {"rl.num_minibatches": 2} if stage in (*runs.RL, *runs.ON_POLICY) else {})
        )
        cut = CUT if stage == "grpo" else {}
        options = TASKS[stage].read_options(tiny.nested(runs.OPTIONS | shaped | CHOICES | cut | {"task": stage}))
        rows = runs.ROWS.get(stage, runs.PROMPTS)
        roles = runs.roles_of(stage, torch.float64)
        roles |= {"ptx": TEXTS} if cut else {}
        model = runs.network(torch.float64)
        inputs = Inputs(processor=ByteTokenizer(), model=model, train_dataset=rows, roles=roles)
        task, _ = TASKS[stage].build_task(task_inputs_of(options, inputs, CPU)).task(world)
        loop = Loop(task, options, world)
        metrics = loop.train()
        weights = torch.cat(
            [loop.state.parallel.full_tensor(name).flatten() for name in loop.state.parallel.parameters()]
        )
        found[stage] = {"weights": weights, "metrics": metrics, "samples": loop.state.cursor.samples}
    return found


def trained_by_recipe(world: World) -> list[dict[str, float]]:
    """What the recipe logs of its first steps, with a smaller network."""
    small = {"model.dim": 32, "model.num_layers": 1, "model.mlp_dim": 48, "trainer.max_steps": 3, "device": "cpu"}
    task = task_of({"recipe": "rlhf_tiny"})
    options = TASKS[task].read_options(compose_config(task, {"recipe": "rlhf_tiny", **small}).values)
    made, _ = TASKS[task].build_task(task_inputs_of(options, Inputs(), CPU)).task(world)
    heard = Heard()
    Loop(made, options, world, callbacks=[heard]).train()
    return heard.lines


@final
class Heard(Callback):
    """Keeps what is logged, without what a clock decides."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_event(self, event: Event, run: RunContext) -> None:
        if event.kind == "log":
            self.lines.append({name: each for name, each in tiny.without_clock(event.record).items() if name != "kind"})


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """What one process does."""
    return trained(0, ParallelConfig())


@pytest.mark.slow
@pytest.mark.prove
@pytest.mark.parametrize(("number", "stages"), [(2, STAGES_TRIED), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_ranks_equal_one(number: int, stages: tuple[str, ...], one: dict[str, Any]) -> None:
    many = run_ranks(number, trained, ParallelConfig(data=number), stages)
    for rank in many:
        assert len(rank["recipe"]) == 3
        for line, wanted in zip(rank["recipe"], one["recipe"], strict=True):
            assert line == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    for stage in stages:
        for rank in many:
            torch.testing.assert_close(rank[stage]["weights"], one[stage]["weights"], rtol=0, atol=1e-9)
            assert rank[stage]["metrics"] == pytest.approx(one[stage]["metrics"], abs=1e-6)
            assert rank[stage]["samples"] == one[stage]["samples"]
