"""The optimizer on the host over several ranks: the bits of the same ranks with it on the device."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kitforge.composition import compose_config
from kitforge.core.kernels.autograd import mixed_precision
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.mesh import Mesh
from kitforge.core.parallel.parallelize import parallel_model_of
from kitforge.core.parallel.world import World
from kitforge.foundation.errors import ConfigError
from tests.distributed.ranks import ask_ranks, run_ranks
from tests.distributed.training import BASE, KIT, LLAMA, MIXTURE, numbers, run_training, world_size, write_text

WHOLE = "KITFORGE_PROVE" in os.environ
GPT2 = {"model": "gpt2_tiny", "model.dim": 32, "model.num_layers": 4, "model.num_heads": 4}
MESHES: dict[str, dict[str, Any]] = {
    "data": {"parallel.data": 2},
    "zero1": {"parallel.shard": 2, "parallel.zero_stage": 1},
    "zero2": {"parallel.shard": 2, "parallel.zero_stage": 2, "trainer.micro_batch_size": 2},
    "zero3": {"parallel.shard": 2, "trainer.micro_batch_size": 2},
    "tensor": {"parallel.tensor": 2, "trainer.micro_batch_size": 3},
    "tensor, whole rows": {"parallel.tensor": 2, "parallel.sequence_parallel": False},
    "context": {"parallel.context": 2},
    "experts": MIXTURE | {"parallel.data": 2, "parallel.expert": 2},
    "experts, sharded": MIXTURE | {"parallel.shard": 2, "parallel.expert": 2},
    "stages": {"parallel.pipeline": 2, "trainer.micro_batch_size": 2},
    "stages, tied": GPT2 | {"parallel.pipeline": 2, "trainer.micro_batch_size": 2},
    "stages, sharded": GPT2 | {"parallel.pipeline": 2, "parallel.shard": 2, "trainer.micro_batch_size": 1},
    "stages in a V": {
        "parallel.pipeline": 2,
        "parallel.schedule": "zero_bubble_v",
        "trainer.micro_batch_size": 2,
        "model.num_layers": 4,
    },
}
SHORT = {"trainer.max_grad_norm": 0.05, "trainer.max_steps": 3, "trainer.eval_every": 3}
STREAMED = "optimizer_and_gradients"
PRODUCT = list(itertools.product(MESHES, ("fp32", "bf16"), ("optimizer", STREAMED)))
# The gate has one run of each axis, and both modes.
CASES = [
    ("data", "bf16", STREAMED),
    ("zero3", "bf16", STREAMED),
    ("tensor", "bf16", STREAMED),
    ("experts, sharded", "bf16", STREAMED),
    ("stages, tied", "fp32", "optimizer"),
    ("stages, sharded", "bf16", STREAMED),
    ("stages in a V", "bf16", STREAMED),
]


def trained(rank: int, folder: Path, choices: Mapping[str, Any]) -> Any:
    mixed_precision.NATIVE_DTYPES[torch.bfloat16] = True
    return run_training(rank, folder, choices)


def answers(folder: Path, runs: Mapping[Any, Mapping[str, Any]]) -> dict[Any, list[Any]]:
    """What each run leaves on each of its ranks."""
    questions = {}
    for number, (name, choices) in enumerate(runs.items()):
        own = folder / str(number)
        write_text(own)
        questions[name] = (world_size(choices), trained, own, {**SHORT, **choices})
    return ask_ranks(questions)


@pytest.mark.prove
def test_ranks_end_with_the_bits_of_ranks_that_keep_the_optimizer(tmp_path: Path) -> None:
    cases = PRODUCT if WHOLE else CASES
    runs = {(*case[:2], mode): (case, mode) for case in cases for mode in ("none", case[2])}
    choices = {
        name: MESHES[case[0]] | {"precision": case[1], "trainer.offload": mode} for name, (case, mode) in runs.items()
    }
    found = answers(tmp_path, choices)
    for mesh, precision, mode in cases:
        for got, wanted in zip(found[mesh, precision, mode], found[mesh, precision, "none"], strict=True):
            for name in ("loss", "eval/loss", "grad_norm"):
                assert numbers(got[0], name) == numbers(wanted[0], name), (mesh, precision, mode, name)
            assert all(torch.equal(got[1][name], each) for name, each in wanted[1].items()), (mesh, precision, mode)


def test_data_parallel_ranks_sum_each_micro_batch_in_fp32(tmp_path: Path) -> None:
    """Their sums are those of another order: of ranks first, then of micro-batches, as under ZeRO-2."""
    runs = {
        mode: {"parallel.data": 2, "trainer.micro_batch_size": 1, "trainer.offload": mode}
        for mode in ("none", STREAMED)
    }
    found = answers(tmp_path, runs)
    for got, wanted in zip(found[STREAMED], found["none"], strict=True):
        assert numbers(got[0], "grad_norm") == pytest.approx(numbers(wanted[0], "grad_norm"), rel=1e-5)
        for name, each in wanted[1].items():
            torch.testing.assert_close(got[1][name], each, rtol=1e-4, atol=1e-6)
    first, second = found[STREAMED]
    assert all(torch.equal(first[1][name], each) for name, each in second[1].items())


def test_gradients_that_wait_do_not_leave_in_sums_over_ranks() -> None:
    staged = MESHES["stages in a V"] | {"trainer.offload": STREAMED, "parallel.data": 2}
    with pytest.raises(ConfigError, match=r"(?s)parallel.schedule.*zero_bubble_v.*trainer.offload=optimizer"):
        KIT.read_options(compose_config("text_generation", {**BASE, **LLAMA, **staged}).values)
    sharded = {"parallel.shard": 2, "parallel.zero_stage": 2}
    others = ({"parallel.schedule": "interleaved"}, sharded, {"parallel.data": 1})
    for choices in others:
        KIT.read_options(compose_config("text_generation", {**BASE, **LLAMA, **staged, **choices}).values)


def repaired(rank: int) -> tuple[dict[str, list[int]], Tensor, Tensor]:
    """The drift of a master weight that differs on rank 1, and what this rank then has on host and device."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    parallel = parallel_model_of(model, World(device=torch.device("cpu"), mesh=Mesh(ParallelConfig(data=2), "cpu")))
    parallel.offload(["weight", "bias"], gradients=False, fraction=1.0, compute_dtype=torch.float32)
    with torch.no_grad():
        parallel.parameters()["weight"].add_(rank)
        model.weight.add_(rank)
    drift = parallel.repair_replicas({}, parallel.layouts)
    return drift, parallel.parameters()["weight"].detach().clone(), model.weight.detach().clone()


def test_a_master_weight_that_drifted_is_repaired_on_host_and_device() -> None:
    (drift, master, weight), (_, others_master, others_weight) = run_ranks(2, repaired)
    assert drift == {"weight": [1]}
    assert all(torch.equal(master, each) for each in (weight, others_master, others_weight))
