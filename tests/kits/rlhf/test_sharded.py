"""Networks that are cut: ranks with a piece of each do what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.safetensors_file import TensorFile
from kitforge.core.parallel.config import ParallelConfig
from kitforge.data.tokenizers.loading import ByteTokenizer
from kitforge.foundation.errors import ModelError
from kitforge.kits.rlhf.build import TASKS
from kitforge.kits.rlhf.roles.model_loading import load_policy
from kitforge.kits.rlhf.tasks import Inputs
from kitforge.trainer.run_folder import train
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import run_ranks
from tests.distributed.training import TestRendezvous
from tests.kits.rlhf import runs
from tests.trainer import tiny

# Five rows a step for two ranks and more, and answers of a round that two minibatches divide.
CHOICES = {
    "data.batch_size": 5,
    "data.eval_fraction": 0.3,
    "trainer.micro_batch_size": 2,
    "trainer.max_steps": 2,
    "trainer.checkpoint_every": 2,
}
# Matrices that are cut by rows and by columns, in attention and beyond it.
ADAPTERS = {"lora.rank": 3, "lora.target_modules": ["query", "value", "out", "up", "down"]}
ALONE = ParallelConfig(sequence_parallel=False)
SHARD = ParallelConfig(shard=2, sequence_parallel=False)
TENSOR = ParallelConfig(tensor=2, sequence_parallel=False)
CONTEXT = ParallelConfig(context=2, sequence_parallel=False)
WITH_TENSOR = ParallelConfig(context=2, tensor=2, sequence_parallel=False)
EXPERTS = ParallelConfig(data=2, expert=2, sequence_parallel=False)
STAGES = ParallelConfig(pipeline=2, sequence_parallel=False)
SQUARE = ParallelConfig(shard=2, tensor=2, sequence_parallel=False)
LESS = [ParallelConfig(shard=2, zero_stage=zero, sequence_parallel=False) for zero in (1, 2)]
# Stages whose rows are cut along the sequence.
CUT_ROWS = ("sft", "reward", "dpo", "kto", "ppo", "grpo")
# Every expert gets tokens of both ranks; the penalty of a sequence is equal on any number of them.
MIXTURE = {**tiny.LLAMA, "family": "mixtral", "experts": {"num_experts": 4, "top_k": 2, "balance": "sequence"}}
# Stages, what they are told beside, and how networks are cut; with experts where the axis of experts is.
SPLIT: list[tuple[str, dict[str, Any], ParallelConfig]] = [
    *(("sft", ADAPTERS, degrees) for degrees in (SHARD, *LESS, TENSOR)),
    *(("ppo", {}, degrees) for degrees in (SHARD, TENSOR)),
    ("reward", {}, SHARD),
    ("dpo", {}, TENSOR),
    ("kto", {}, SHARD),
    ("grpo", ADAPTERS, TENSOR),
    *((each, ADAPTERS if each in ("sft", "grpo") else {}, CONTEXT) for each in CUT_ROWS),
    *((stage, {}, EXPERTS) for stage in ("dpo", "ppo")),
    ("distill", {}, SHARD),
    ("distill", {}, TENSOR),
    *((each, ADAPTERS if each == "sft" else {}, STAGES) for each in ("sft", "reward", "dpo", "kto")),
]
# In the gate what neither a row of tests/verify/test_contracts.py nor `test_memory.py` has: adapters, rows that are cut
# beside those of a reference, and a critic of experts.
SPLIT = SPLIT if WHOLE else [SPLIT[place] for place in (1, 9, 13, 17, 19, -4, -2)]
QUARTERS: list[tuple[str, dict[str, Any], ParallelConfig]] = [
    ("sft", ADAPTERS, SQUARE),
    ("grpo", ADAPTERS, ParallelConfig(shard=2, context=2)),
    *((stage, {}, WITH_TENSOR) for stage in ("ppo", "dpo")),
    ("ppo", {}, ParallelConfig(data=2, expert=2, tensor=2, sequence_parallel=False)),
][: None if WHOLE else 3]


def trained(_rank: int, folder: Path, cases: list[tuple[str, dict[str, Any], ParallelConfig]]) -> list[dict[str, Any]]:
    """Metrics and whole weights of a short run of each case, in float64."""
    torch.set_num_threads(1)
    return [run(folder / f"{number}", *case) for number, case in enumerate(cases)]


def family_of(degrees: ParallelConfig) -> dict[str, Any]:
    """With experts and heads for all ranks among which they are divided."""
    if degrees.expert > 1:
        return MIXTURE
    return {**tiny.LLAMA, "num_heads": max(2, degrees.context * degrees.tensor)}


def run(
    folder: Path, stage: str, choices: dict[str, Any], degrees: ParallelConfig, family: dict[str, Any] | None = None
) -> dict[str, Any]:
    rounds = runs.ROUNDS | {"rl.num_minibatches": 2} if stage in (*runs.RL, *runs.ON_POLICY) else {}
    values = runs.OPTIONS | runs.SHAPED.get(stage, {}) | CHOICES | rounds | choices
    values |= {
        f"parallel.{name}": getattr(degrees, name)
        for name in ("pipeline", "data", "shard", "context", "expert", "tensor", "sequence_parallel", "zero_stage")
    }
    options = TASKS[stage].read_options(tiny.nested(values | {"task": stage, "output_dir": str(folder)}))
    TASKS[stage].check_parallel(options)
    inputs = Inputs(
        processor=ByteTokenizer(),
        model=runs.network(torch.float64, family or family_of(degrees)),
        train_dataset=runs.ROWS.get(stage, runs.PROMPTS),
        roles=runs.roles_of(stage, torch.float64),
    )
    made: Any = TASKS[stage].assemble(options, inputs, TestRendezvous(degrees))  # type: ignore[arg-type]
    metrics = train(made.loop, made.options, made.folder, made.config_text)
    parallel = made.loop.state.parallel
    # Of other stages too, whose ranks gather with this one.
    trained = parallel.union(name for name, each in parallel.parameters().items() if each.requires_grad)
    weights = {name: parallel.full_tensor(name) for name in trained}
    return {"metrics": metrics, "weights": weights}


def name_of(stage: str, choices: dict[str, Any], degrees: ParallelConfig) -> str:
    """Of the run of one process that a case is compared with."""
    family = family_of(degrees)
    return f"{stage}{len(choices)}-{family['family']}-{family['num_heads']}"


def adapter(folder: Path) -> dict[str, Tensor]:
    file = TensorFile(folder / "adapter" / "adapter_model.safetensors", ModelError)
    return {name: file.tensor(name) for name in file.names()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-9), f"{what}: {name}"


@pytest.mark.slow
@pytest.mark.prove
def test_ranks_with_pieces_equal_one(tmp_path: Path) -> None:
    """Stages beside each other in one process of each rank: that the losses of a stage, and all it is told by its rows,
    are summed over whatever axis cuts its networks."""
    wanted: dict[str, dict[str, Any]] = {}
    for size, cases in ((2, SPLIT), (4, QUARTERS)):
        for stage, choices, degrees in cases:
            name = name_of(stage, choices, degrees)
            if name not in wanted:
                wanted[name] = run(tmp_path / name, stage, choices, ALONE, family_of(degrees))
        for rank in run_ranks(size, trained, tmp_path / f"{size}", cases):
            for found, (stage, choices, degrees) in zip(rank, cases, strict=True):
                one = wanted[name_of(stage, choices, degrees)]
                assert_close(
                    found["weights"], one["weights"], f"{stage} {degrees.describe()} zero={degrees.zero_stage}"
                )
                # The loss of pairs is computed in fp32.
                assert found["metrics"] == pytest.approx(one["metrics"], abs=1e-6)
    # One process goes on where four have ended, and what they left is an adapter and a policy like any other.
    whole, cut = tmp_path / name_of("sft", ADAPTERS, ALONE), tmp_path / "4" / "0"
    tokens, wanted_adapter = torch.arange(9).unsqueeze(0), adapter(whole)
    for folder in (cut, tmp_path / "2" / str(SPLIT.index(("sft", ADAPTERS, STAGES)))):
        assert_close(adapter(folder), wanted_adapter, "adapter")
        with torch.no_grad():
            left, right = (load_policy(each, torch.device("cpu"))(tokens) for each in (folder, whole))
        torch.testing.assert_close(left, right, rtol=0, atol=1e-5)
    further = ADAPTERS | {"trainer.max_steps": 3, "resume": "auto", "trainer.allow_config_changes": True}
    longer, same = (run(folder, "sft", further, ALONE) for folder in (cut, whole))
    assert_close(longer["weights"], same["weights"], "resumed")
