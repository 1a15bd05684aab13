"""Whole runs on several ranks equal the run of one process, whatever the mesh, and go on under another."""

import itertools
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.training import ready, run_training, write_text

MESHES: list[dict[str, Any]] = [
    {"parallel.data": 2},
    {"parallel.data": 4},
    {"parallel.shard": 2},
    {"parallel.shard": 3},
    {"parallel.shard": 2, "parallel.zero": 1},
    {"parallel.tensor": 2},
    {"parallel.tensor": 4, "parallel.sequence": False},
    {"parallel.data": 2, "parallel.shard": 2},
    {"parallel.data": 2, "parallel.tensor": 2},
    {"parallel.shard": 2, "parallel.tensor": 2},
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
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "muon": {"optimizer.name": "muon"},
    "micro-batches": {"trainer.micro_batch_size": 2},
    "documents and dropout": {**GPT2, "data.separator": ", "},
    # Ranks run dry within a step, and the last step of the epoch is smaller.
    "fewer rows than ranks": {"data.batch_size": 3, "trainer.epochs": 0.14, "trainer.max_steps": None},
}
PRODUCT = list(itertools.product(KINDS, range(len(MESHES))))
CASES = PRODUCT if "KITFORGE_PROVE" in os.environ else random.Random(5).sample(PRODUCT, 7)


def world(choices: Mapping[str, Any]) -> int:
    degrees = [choices.get(f"parallel.{axis}", 1) for axis in ("data", "shard", "tensor")]
    return degrees[0] * degrees[1] * degrees[2]


def numbers(lines: list[dict[str, Any]], name: str) -> list[float]:
    return [line[name] for line in lines if name in line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_losses_of_a_run_are_those_of_one_process(folder: Path, tmp_path: Path, kind: str, mesh: int) -> None:
    choices = KINDS[kind]
    one, _ = run_training(0, folder, {**choices, "output_dir": str(tmp_path / "one")})
    split = {**choices, **MESHES[mesh], "output_dir": str(tmp_path / "many")}
    for lines, _ in run_ranks(world(split), run_training, folder, split):
        assert numbers(lines, "tokens") == numbers(one, "tokens")
        for name in ("loss", "eval/loss"):
            assert numbers(lines, name) == pytest.approx(numbers(one, name), abs=2e-6)
        assert numbers(lines, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)


def go_on(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    return run_training(rank, folder, {**choices, "resume": "auto"})


@pytest.mark.parametrize(
    "later", [{}, {"parallel.tensor": 2}, {"parallel.shard": 3}, {"parallel.tensor": 4}, {"parallel.data": 2}], ids=str
)
def test_a_run_goes_on_under_another_mesh(folder: Path, tmp_path: Path, later: dict[str, Any]) -> None:
    whole, _ = run_training(0, folder, {**GPT2, "output_dir": str(tmp_path / "whole")})
    first = {**GPT2, "output_dir": str(tmp_path / "split"), "trainer.checkpoint_every": 6}
    run_ranks(4, half, folder, first | {"parallel.shard": 2, "parallel.tensor": 2})
    second = first | later
    outcomes = run_ranks(world(second), go_on, folder, second) if world(second) > 1 else [go_on(0, folder, second)]
    for lines, _ in outcomes:
        assert numbers(lines, "loss") == pytest.approx(numbers(whole, "loss")[6:], abs=2e-6)


def half(rank: int, folder: Path, choices: Mapping[str, Any]) -> None:
    """Train until the checkpoint of step 6 is there, then stop as a signal would have it."""
    torch.set_num_threads(1)
    assembly, told = ready(rank, folder, choices)
    told.stop_at = 6
    from kitforge.trainer.run import train

    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def test_resuming_on_the_same_mesh_is_exact(folder: Path, tmp_path: Path) -> None:
    mesh = {"parallel.shard": 2, "parallel.tensor": 2}
    whole = run_ranks(4, run_training, folder, {**mesh, "output_dir": str(tmp_path / "whole")})
    split = {**mesh, "output_dir": str(tmp_path / "split"), "trainer.checkpoint_every": 6}
    run_ranks(4, half, folder, split)
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
