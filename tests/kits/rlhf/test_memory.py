"""What a stage of alignment is cut into is read by pieces: no rank holds a whole policy, reference or reward model."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.roles.model_copy import fingerprint
from kitforge.kits.rlhf.roles.model_loading import load_policy, load_reward_model
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of
from kitforge.trainer.run_folder import train
from tests.allocations import Allocations
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.distributed.training import TestRendezvous
from tests.kits.rlhf import runs
from tests.trainer import tiny

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
# Every matrix is large beside all else, and no dim of the first is divided evenly.
WIDE = {
    "family": "llama",
    "num_layers": 2,
    "dim": 96,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 250,
    "vocab_size": 1001,
    "max_length": 64,
}
ALONE = ParallelConfig(sequence_parallel=False)
SHARD = ParallelConfig(shard=2, sequence_parallel=False)
TENSOR = ParallelConfig(tensor=2, sequence_parallel=False)
# In the gate every stage and every source once, and both axes.
CASES = [
    ("sft", "exported", SHARD),
    ("dpo", "exported", TENSOR),
    ("kto", "run", SHARD),
    ("reward", "judge", SHARD),
    ("dpo", "run", SHARD),
    ("reward", "run", TENSOR),
][: None if WHOLE else 4]
# A policy and a critic or none, from a reward model and from none, under both axes.
ROLES = [("ppo", "judge", TENSOR), ("grpo", "judge", SHARD), ("ppo", "lowercase", SHARD)][: None if WHOLE else 1]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process, and an export."""
    folder = tmp_path_factory.mktemp("memory")
    given = model_folder.build(config_of(WIDE), device=CPU, seed=3)
    model_folder.save(given, folder / "exported")
    ByteTokenizer().save(folder / "exported")
    choices = {"trainer.max_steps": 1}
    runs.finish(runs.begin("sft", folder / "run", choices, model=given))
    runs.finish(runs.begin("reward", folder / "judge", choices, model=given))
    return folder


def options_of(stage: str, degrees: ParallelConfig, **more: Any) -> Any:
    values = runs.OPTIONS | runs.SHAPED.get(stage, {}) | (runs.ROUNDS if stage in runs.RL else {}) | {"task": stage}
    values |= {f"parallel.{name}": getattr(degrees, name) for name in ("shard", "tensor", "sequence_parallel")}
    return TASKS[stage].read_options(tiny.nested(values | more))


def run(_rank: int, folder: Path, target: Path, case: tuple[str, str, ParallelConfig]) -> dict[str, Any]:
    """The largest storage that is made until a run may start; its weights then, and its metrics afterwards."""
    torch.set_num_threads(1)
    stage, source, degrees = case
    values: dict[str, Any] = {"checkpoint": str(folder / source), "trainer.max_steps": 2}
    values["output_dir"] = str(target / f"{degrees.world_size}")
    # Few tokens at once, beside which the weights are large.
    values |= {"trainer.micro_batch_size": 1, "trainer.checkpoint_every": 1, "optimizer.name": "sgd"}
    options = options_of(stage, degrees, **values)
    with Allocations() as made:
        inputs = Inputs(train_dataset=runs.ROWS[stage])
        begun: Any = TASKS[stage].assemble(options, inputs, TestRendezvous(degrees))  # type: ignore[arg-type]
    parallel = begun.loop.state.parallel
    pieces = parallel.parameters()
    limit = max(each.nbytes for each in pieces.values()) + 4 * cast(int, WIDE["dim"])
    weights = {name: parallel.full_tensor(name).clone() for name in pieces}
    found = {"largest": made.largest, "limit": limit, "weights": weights}
    found["metrics"] = train(begun.loop, begun.options, begun.folder, begun.config_text)
    if degrees.shard > 1 and stage in ("dpo", "kto"):
        # What a pass through the reference has gathered is let go again.
        reference = begun.loop.task._reference_model.model
        assert all(isinstance(each, DTensor) for each in reference.parameters())
    return found


@pytest.mark.prove
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].describe()}")
def test_a_stage_reads_what_it_starts_from_by_pieces(
    place: Path, tmp_path: Path, case: tuple[str, str, ParallelConfig]
) -> None:
    stage, source, _ = case
    alone = run(0, place, tmp_path, (stage, source, ALONE))
    wanted: dict[str, Tensor]
    if source == "judge":
        wanted = dict(load_reward_model(place / source, CPU).named_parameters())
    else:
        wanted = dict(load_policy(place / source, CPU).named_parameters())
    for found in run_ranks(2, run, place, tmp_path, case):
        assert found["largest"] <= found["limit"], f"{found['largest']:,} bytes, at most {found['limit']:,} expected"
        assert found["weights"].keys() == alone["weights"].keys()
        for name, weight in found["weights"].items():
            assert torch.equal(weight, alone["weights"][name]), name
            own = wanted.get(name, wanted.get(name.removeprefix("backbone.")))
            assert own is None or torch.equal(weight, own), name
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-5)
    if stage == "dpo":
        # The reference is known by its weights, in pieces as whole.
        checkpoints = [find_checkpoint(tmp_path / name) for name in ("1", "2")]
        known = {each.state["task"]["reference"] for each in checkpoints if each is not None}
        assert known == {fingerprint(load_policy(place / source, CPU))}


def play(rank: int, folder: Path, target: Path, case: tuple[str, str, ParallelConfig]) -> dict[str, Any]:
    """A run of rewards whose ranks that train hold what they train, and nothing else; rank 2 has all the rest."""
    torch.set_num_threads(1)
    stage, judge, degrees = case
    values: dict[str, Any] = {"trainer.max_steps": 2, "optimizer.name": "sgd", "data.eval_fraction": 0.0}
    values |= {"checkpoint": str(folder / "exported"), "output_dir": str(target / f"{degrees.world_size}")}
    values |= {"reward": str(folder / judge) if judge == "judge" else judge, "trainer.micro_batch_size": 1}
    if degrees.world_size > 1:
        values |= {f"role_ranks.{name}": [2] for name in ("rollout", "reference", "reward")}
    options = options_of(stage, degrees, **values)
    inputs, lobby = Inputs(train_dataset=runs.PROMPTS), cast(Any, TestRendezvous(degrees))
    with Allocations() as made:
        begun: Any = TASKS[stage].assemble(options, inputs, lobby)
    parallel = begun.loop.state.parallel
    pieces = parallel.parameters()
    limit = max((each.nbytes for each in pieces.values()), default=0) + 4 * cast(int, WIDE["dim"])
    weights = {name: parallel.full_tensor(name).clone() for name in pieces}
    found = {"largest": made.largest, "limit": limit, "weights": weights}
    found["metrics"] = train(begun.loop, begun.options, begun.folder, begun.config_text)
    return found


@pytest.mark.prove
@pytest.mark.parametrize("case", ROLES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].describe()}")
def test_policy_and_critic_are_read_by_pieces(
    place: Path, tmp_path: Path, case: tuple[str, str, ParallelConfig]
) -> None:
    alone = play(0, place, tmp_path, (*case[:2], ALONE))
    for rank, found in enumerate(run_ranks(3, play, place, tmp_path, case)):
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3, abs=1e-4)
        if rank < 2:
            assert found["largest"] <= found["limit"], (
                f"{found['largest']:,} bytes, at most {found['limit']:,} expected"
            )
            assert found["weights"].keys() == alone["weights"].keys()
            assert all(torch.equal(each, alone["weights"][name]) for name, each in found["weights"].items())


def measured(_rank: int, folder: Path, case: tuple[str, Path, ParallelConfig]) -> dict[str, float]:
    torch.set_num_threads(1)
    stage, source, degrees = case
    reward = {"reward": "lowercase"} if stage in runs.RL else {}
    options = options_of(stage, degrees, checkpoint=str(source), **reward)
    rows = runs.ROWS.get(stage, runs.PROMPTS)
    inputs = Inputs(eval_dataset=rows[:4], processor=ByteTokenizer())
    return TASKS[stage].evaluate(options, inputs, TestRendezvous(degrees))  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", ["ppo", "dpo", "reward"])
def test_an_evaluation_in_pieces_is_that_of_the_whole(place: Path, tmp_path: Path, stage: str) -> None:
    choices: dict[str, Any] = {"checkpoint": str(place / "exported"), "trainer.max_steps": 2}
    choices |= {"kl.coef": 0.0, "kl.measure": True}
    choices = {name: each for name, each in choices.items() if name[:2] != "kl" or stage in runs.RL}
    runs.finish(runs.begin(stage, tmp_path / stage, choices, model=None))
    alone = measured(0, place, (stage, tmp_path / stage, ALONE))
    assert stage not in runs.RL or alone["eval/kl"] > 1e-4
    for found in run_ranks(2, measured, place, (stage, tmp_path / stage, SHARD)):
        assert found == pytest.approx(alone, rel=1e-3, abs=1e-4)
