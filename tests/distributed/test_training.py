"""Whole runs on several ranks equal the run of one process, whatever the mesh, and go on under another."""

import functools
import itertools
import math
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kitforge.core.optim import muon
from tests.distributed.ranks import run_ranks
from tests.distributed.training import ready, run_training, write_text

pytestmark = pytest.mark.slow

MESHES: list[dict[str, Any]] = [
    {"parallel.data": 2},
    {"parallel.data": 4},
    {"parallel.shard": 2},
    {"parallel.shard": 3},
    {"parallel.shard": 2, "parallel.zero_stage": 1},
    {"parallel.tensor": 2},
    {"parallel.tensor": 4, "parallel.sequence_parallel": False},
    {"parallel.data": 2, "parallel.shard": 2},
    {"parallel.data": 2, "parallel.tensor": 2},
    {"parallel.shard": 2, "parallel.tensor": 2},
    {"parallel.context": 2},
    {"parallel.context": 2, "parallel.tensor": 2},
    {"parallel.shard": 2, "parallel.context": 2},
    {"parallel.data": 2, "parallel.context": 2},
]
GPT2 = {
    "model": "gpt2_tiny",
    "model.dim": 32,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.embedding_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.residual_dropout": 0.1,
}
MIXTURE = {
    "model": "llama_moe_tiny",
    "model.num_layers": 2,
    "model.dim": 32,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 12,
    "model.experts.num_experts": 4,
    "model.experts.balance_weight": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1},
    "muon": {"optimizer.name": "muon"},
    "micro-batches": {"trainer.micro_batch_size": 2},
    "documents and dropout": {**GPT2, "data.separator": ", "},
    # Ranks run dry within a step, and the last step of the epoch is smaller.
    "fewer rows than ranks": {"data.batch_size": 3, "trainer.epochs": 0.14, "trainer.max_steps": None},
    "experts": {**MIXTURE, "data.batch_size": 3, "trainer.max_steps": 6},
    "experts with a bias": {
        **MIXTURE,
        "model.experts.balance": "bias",
        "model.experts.bias_rate": 0.05,
        "optimizer.learning_rate": 2e-3,
        "trainer.max_steps": 7,  # an odd number of equal steps up and down
    },
}
GOES_ON = {"one text and dropout": GPT2}
SQUARE = {"parallel.shard": 2, "parallel.tensor": 2}
PRODUCT = list(itertools.product(KINDS, range(len(MESHES))))
CASES = PRODUCT if "KITFORGE_PROVE" in os.environ else random.Random(5).sample(PRODUCT, 7)


def world(choices: Mapping[str, Any]) -> int:
    return math.prod(choices.get(f"parallel.{axis}", 1) for axis in ("data", "shard", "context", "tensor"))


def numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


@pytest.fixture(autouse=True)
def products_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Muon orthogonalises in bf16 where a processor has it; the last bit of a gradient then moves a loss by 1e-4."""
    monkeypatch.setattr("kitforge.core.optim.muon.has_native_matmul", lambda *_: False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    """Muon's products in fp32 on every machine: in bf16 what rounding leaves between layouts grows to 5e-5."""
    with mock.patch.object(muon, "has_native_matmul", lambda *_: False):
        yield


@functools.cache
def alone(folder: Path, kind: str) -> list[dict[str, Any]]:
    """The log of one process."""
    lines, _ = run_training(0, folder, {**(KINDS | GOES_ON)[kind], "output_dir": str(folder / kind)})
    return lines


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_losses_of_a_run_are_those_of_one_process(folder: Path, tmp_path: Path, kind: str, mesh: int) -> None:
    one = alone(folder, kind)
    split = {**KINDS[kind], **MESHES[mesh], "output_dir": str(tmp_path / "many")}
    for lines, _ in run_ranks(world(split), run_training, folder, split):
        assert numbers(lines, "tokens") == numbers(one, "tokens")
        for name in ("loss", "eval/loss"):
            assert numbers(lines, name) == pytest.approx(numbers(one, name), abs=2e-6)
        assert numbers(lines, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("documents and dropout", {"parallel.context": 2, "parallel.tensor": 2}),
        ("sgd", {"parallel.context": 2, "trainer.micro_batch_size": 2}),
        ("muon", {"parallel.shard": 2, "parallel.context": 2, "data.sequence_length": 15}),
    ],
    ids=str,
)
def test_rows_that_are_cut_give_the_losses_of_one_process(
    folder: Path, tmp_path: Path, kind: str, mesh: dict[str, Any]
) -> None:
    length = {name: value for name, value in mesh.items() if name.startswith("data.")}
    choices = KINDS[kind] | length
    one, _ = run_training(0, folder, {**choices, "output_dir": str(tmp_path / "one")})
    split = {**KINDS[kind], **mesh, "output_dir": str(tmp_path / "many")}
    for lines, _ in run_ranks(world(split), run_training, folder, split):
        for name in ("loss", "eval/loss"):
            assert numbers(lines, name) == pytest.approx(numbers(one, name), abs=2e-6)
        assert numbers(lines, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        # One rank has a dry row in every step.
        ("experts", {"parallel.data": 2, "parallel.tensor": 2}),
        ("experts with a bias", {"parallel.context": 2}),
        ("experts", {"trainer.micro_batch_size": 1}),
        ("experts with a bias", {"parallel.shard": 2, "trainer.micro_batch_size": 2}),
    ],
    ids=str,
)
def test_experts_and_their_load_are_those_of_one_process(
    folder: Path, tmp_path: Path, kind: str, mesh: dict[str, Any]
) -> None:
    one = alone(folder, kind)
    split = {**KINDS[kind], **mesh, "output_dir": str(tmp_path / "many")}
    for lines, pieces in run_ranks(world(split), run_training, folder, split):
        assert numbers(lines, "loss") == pytest.approx(numbers(one, "loss"), abs=2e-6)
        for name in ("experts/load/0", "experts/load/3", "experts/fullest"):
            assert numbers(lines, name) == numbers(one, name)
        means = [sum(line[f"experts/load/{each}"] for each in range(4)) / 4 for line in lines if "grad_norm" in line]
        assert means == pytest.approx([1.0] * len(means))
        biases = [each for name, each in pieces.items() if name.endswith("router.bias")]
        assert not biases or any(each.abs().max() > 0 for each in biases)


def go_on(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return run_training(rank, folder, {**choices, "resume": "auto"})


@pytest.fixture(scope="module")
def halfway(folder: Path) -> Path:
    """A run of four ranks that has stopped at its checkpoint of step 6; to be copied and never written."""
    place = folder / "halfway"
    run_ranks(4, half, folder, {**GPT2, **SQUARE, "output_dir": str(place), "trainer.checkpoint_every": 6})
    return place


@pytest.mark.parametrize(
    "later",
    [
        {},
        {"parallel.shard": 3},
        {"parallel.tensor": 4},
        {"parallel.context": 2},
    ],
    ids=str,
)
def test_a_run_goes_on_under_another_mesh(folder: Path, halfway: Path, tmp_path: Path, later: dict[str, Any]) -> None:
    whole = numbers(alone(folder, "one text and dropout"), "loss")
    copy = shutil.copytree(halfway, tmp_path / "split")
    second = {**GPT2, **later, "output_dir": str(copy), "trainer.checkpoint_every": 6}
    outcomes = run_ranks(world(second), go_on, folder, second) if world(second) > 1 else [go_on(0, folder, second)]
    for lines, _ in outcomes:
        assert numbers(lines, "loss") == pytest.approx(whole[6:], abs=2e-6)


@pytest.mark.parametrize("later", [{}, {"parallel.context": 2, "parallel.tensor": 2}], ids=str)
def test_a_run_of_cut_rows_goes_on_under_another_mesh(
    folder: Path, halfway_cut: Path, tmp_path: Path, later: dict[str, Any]
) -> None:
    whole = numbers(alone(folder, "one text and dropout"), "loss")
    copy = shutil.copytree(halfway_cut, tmp_path / "split")
    second = {**GPT2, **later, "output_dir": str(copy), "trainer.checkpoint_every": 6}
    outcomes = run_ranks(world(second), go_on, folder, second) if world(second) > 1 else [go_on(0, folder, second)]
    for lines, _ in outcomes:
        assert numbers(lines, "loss") == pytest.approx(whole[6:], abs=2e-6)


@pytest.fixture(scope="module")
def halfway_cut(folder: Path) -> Path:
    """The same with rows that are cut, and sharded weights."""
    mesh, output_dir = {"parallel.shard": 2, "parallel.context": 2}, folder / "halfway_cut"
    run_ranks(4, half, folder, {**GPT2, **mesh, "output_dir": str(output_dir), "trainer.checkpoint_every": 6})
    return output_dir


def half(rank: int, folder: Path, choices: Mapping[str, Any]) -> None:
    """Train until the checkpoint of step 6 is there, then stop as a signal would have it."""
    torch.set_num_threads(1)
    assembly, told = ready(rank, folder, choices)
    told.stop_at = 6
    from kitforge.trainer.run_folder import train

    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def test_resuming_on_the_same_mesh_is_exact(folder: Path, halfway: Path, tmp_path: Path) -> None:
    whole = run_ranks(4, run_training, folder, {**GPT2, **SQUARE, "output_dir": str(tmp_path / "whole")})
    copy = shutil.copytree(halfway, tmp_path / "split")
    split = {**GPT2, **SQUARE, "output_dir": str(copy), "trainer.checkpoint_every": 6}
    for (lines, weights), (expected_lines, expected) in zip(run_ranks(4, go_on, folder, split), whole, strict=True):
        assert numbers(lines, "loss") == numbers(expected_lines, "loss")[6:]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def poisoned(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[int, int, float]:
    """One rank's loss is not finite in step 3."""
    torch.set_num_threads(1)
    assembly, _ = ready(rank, folder, choices)
    loop, task = assembly.loop, assembly.loop.task
    honest = task.loss

    def loss(model: Any, micro_batch: Any) -> Any:
        sums = honest(model, micro_batch)
        is_bad = rank == 1 and micro_batch["step"] == 3
        return {name: value * float("inf") if is_bad else value for name, value in sums.items()}

    task.loss = loss  # type: ignore[method-assign]
    loop.train()
    norm = sum(float(piece.detach().norm()) for piece in loop.state.parallel.parameters().values())
    return loop.state.skipped, loop.state.updates, norm


@pytest.mark.parametrize("mesh", [{"parallel.data": 2}, {"parallel.shard": 2}], ids=str)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(
    folder: Path, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    for skipped, updates, norm in run_ranks(2, poisoned, folder, {**mesh, "output_dir": str(tmp_path / "run")}):
        assert (skipped, updates) == (1, 11)
        assert norm < 1e6
