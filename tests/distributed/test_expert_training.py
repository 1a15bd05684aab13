"""Whole runs with divided experts equal the run of one process, and go on under any other division of the ranks.

One launch for each number of ranks and stage of the story runs all of its runs.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kitforge.core.checkpoint import safetensors_file, snapshot
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.errors import CheckpointError, ConfigError
from kitforge.trainer.run_folder import train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_training import MIXTURE, numbers, world
from tests.distributed.training import ready, run_training, write_text

pytestmark = pytest.mark.slow

HALF = 4
BASE = MIXTURE | {"data.batch_size": 5, "trainer.max_steps": 6, "trainer.checkpoint_every": HALF}
BIAS = {
    **BASE,
    "model.experts.balance": "bias",
    "model.experts.bias_rate": 0.05,
    "optimizer.learning_rate": 2e-3,
    "trainer.max_steps": 7,  # an odd number of equal steps up and down
}
KINDS = {"sequence": BASE, "bias": BIAS, "sgd": BASE | {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1}}


def divided(expert: int, **degrees: int) -> dict[str, Any]:
    return {f"parallel.{name}": degree for name, degree in degrees.items()} | {"parallel.expert": expert}


# A rank has a dry row in some step; capacity and recomputation; copies of experts, sharded or not.
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("sequence", divided(2, data=2) | {"trainer.micro_batch_size": 1, "trainer.activation_checkpointing": "full"}),
    ("bias", divided(2, shard=2) | {"trainer.micro_batch_size": 2, "trainer.activation_checkpointing": "selective"}),
    ("sequence", divided(2, data=2, tensor=2)),
    ("bias", divided(2, data=2, context=2)),
    ("sequence", divided(4, shard=2, context=2)),
    ("sgd", divided(2, shard=4)),
]
# By the ranks that stop, those that go on.
FIRST = [divided(2, data=2, tensor=2), divided(2, shard=4)]
LATER: list[dict[str, Any]] = [
    {},
    divided(1, tensor=2),
    divided(2, shard=2),
    divided(2, data=2, tensor=2),
    divided(4, data=4),
    divided(2, shard=2, context=2),
]
# Of those that stop, none and then FIRST, and of those that go on: each goes on from one, beside the whole product.
RESUMED = [
    (first, later)
    for later, first in itertools.product(range(len(LATER)), range(len(FIRST) + 1))
    if "KITFORGE_PROVE" in os.environ or first == (later + 1) % (len(FIRST) + 1)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


@functools.cache
def alone(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines, _ = run_training(0, folder, {**KINDS[kind], "output_dir": str(folder / kind)})
    return lines


def runs(rank: int, folder: Path, each: list[Mapping[str, Any]]) -> list[list[dict[str, Any]]]:
    return [run_training(rank, folder, choices)[0] for choices in each]


def halves(rank: int, folder: Path, each: list[Mapping[str, Any]]) -> None:
    """Train until the checkpoint is there, then stop as a signal would have it."""
    torch.set_num_threads(1)
    for choices in each:
        assembly, told = ready(rank, folder, choices)
        told.stop_at = HALF
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)


def resumed(rank: int, folder: Path, each: list[Mapping[str, Any]]) -> list[tuple[list[dict[str, Any]], list[str]]]:
    """The log of each run that goes on, and the tensors that this rank has not read to the bit."""
    torch.set_num_threads(1)
    found = []
    for choices in each:
        assembly, told = ready(rank, folder, choices | {"resume": "auto"})
        checkpoint = open_checkpoint(Path(choices["output_dir"]) / "checkpoints" / f"step_{HALF}")
        state = assembly.loop.state
        assembly.loop.resume(checkpoint)
        pieces = {**dict(state.model_tensors()), **dict(state.optimizer.tensors())}
        regions = state.parallel.regions(state.layouts())
        wanted = {name: checkpoint.tensor(name) for name in pieces}
        wrong = [
            name
            for name, piece in pieces.items()
            if not torch.equal(piece, regions[name].of(wanted[name]) if name in regions else wanted[name])
        ]
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
        found.append((told.lines, wrong))
    return found


def refused(rank: int, folder: Path, choices: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        run_training(rank, folder, choices)
    return str(error.value)


def test_a_step_of_two_replicas_is_not_balanced_over_the_batch_of_each(folder: Path) -> None:
    choices = {**BASE, "data.batch_size": 4, "model.experts.balance": "batch", "output_dir": str(folder / "replicas")}
    for found in run_ranks(2, refused, folder, choices | divided(1, data=2)):
        assert "1 micro-batches a step on each of 2 replicas" in found


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[list[dict[str, Any]]]]:
    """Of each run, the logs of its ranks."""
    choices = [
        {**KINDS[kind], **mesh, "output_dir": str(folder / f"whole_{number}")}
        for number, (kind, mesh) in enumerate(WHOLE)
    ]
    found: dict[int, list[list[dict[str, Any]]]] = {}
    for size in (2, 4):
        numbers_of_size = [number for number, each in enumerate(choices) if world(each) == size]
        ranks = run_ranks(size, runs, folder, [choices[number] for number in numbers_of_size])
        found |= {number: [rank[place] for rank in ranks] for place, number in enumerate(numbers_of_size)}
    return [found[number] for number in range(len(choices))]


@pytest.mark.parametrize("number", range(len(WHOLE)), ids=lambda number: str(WHOLE[number]))
def test_runs_with_divided_experts_are_those_of_one_process(
    folder: Path, whole: list[list[list[dict[str, Any]]]], number: int
) -> None:
    one = alone(folder, WHOLE[number][0])
    for lines in whole[number]:
        for name in ("loss", "eval/loss"):
            assert numbers(lines, name) == pytest.approx(numbers(one, name), abs=2e-6)
        assert numbers(lines, "grad_norm") == pytest.approx(numbers(one, "grad_norm"), rel=1e-4)
        for name in ("experts/load/0", "experts/load/3", "experts/fullest", "experts/dropped"):
            assert numbers(lines, name) == numbers(one, name)


@pytest.fixture(scope="module")
def halfway(folder: Path) -> list[Path]:
    """Runs that have stopped at their checkpoint, one of one process; to be copied and never written."""
    places = [folder / f"halfway_{number}" for number in range(len(FIRST) + 1)]
    halves(0, folder, [{**BASE, "output_dir": str(places[0])}])
    run_ranks(
        4,
        halves,
        folder,
        [{**BASE, **mesh, "output_dir": str(place)} for mesh, place in zip(FIRST, places[1:], strict=True)],
    )
    return places


@pytest.mark.prove
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_run_goes_on_under_any_other_division(folder: Path, halfway: list[Path], tmp_path: Path, size: int) -> None:
    wanted = numbers(alone(folder, "sequence"), "loss")[HALF:]
    choices = [
        {**BASE, **LATER[later], "output_dir": str(shutil.copytree(halfway[first], tmp_path / f"{first}_{later}"))}
        for first, later in RESUMED
        if world(LATER[later]) == size
    ]
    ranks = [resumed(0, folder, choices)] if size == 1 else run_ranks(size, resumed, folder, choices)
    for rank in ranks:
        for lines, wrong in rank:
            assert not wrong
            assert numbers(lines, "loss") == pytest.approx(wanted, abs=2e-6)


def test_every_expert_is_saved_once(halfway: list[Path]) -> None:
    stored = []
    for place in halfway:
        folder = place / "checkpoints" / f"step_{HALF}"
        files = [safetensors_file.TensorFile(path, CheckpointError) for path in folder.glob("*.safetensors")]
        stored.append(sum(file.tensor(name).nbytes for file in files for name in file.names()))
        checkpoint = open_checkpoint(folder)
        for name in ("gate", "up", "down"):
            experts = f"blocks.1.mlp.experts.{name}"
            assert len(checkpoint.tensor(experts)) == BASE["model.experts.num_experts"]
            slices = list(checkpoint.entry(experts).slices())
            assert sum(torch.Size(each.shape).numel() for each in slices) == checkpoint.tensor(experts).numel()
    assert len(set(stored)) == 1


def _of_the_first_ranks_alone() -> Any:
    """Only the experts of the first ranks are saved."""
    original = Grid.shards
    return mock.patch.object(
        Grid, "shards", lambda self, layout: original(self, layout)[: 1 if "expert" in layout.axes else None]
    )


def _by_every_holder() -> Any:
    """Every rank saves the experts that it holds, also those that others hold."""
    original = snapshot.assign_shards

    def assigned(tensors: Iterable[tuple[Layout, int]], grid: Grid, rank: int) -> list[bool]:
        given = list(tensors)
        owned = original(given, grid, rank)
        return [own or "expert" in layout.axes for own, (layout, _) in zip(owned, given, strict=True)]

    return mock.patch.object(snapshot, "assign_shards", assigned)


SAVES: dict[str, Callable[[], Any]] = {"never": _of_the_first_ranks_alone, "twice": _by_every_holder}


def saved_wrongly(rank: int, folder: Path, choices: Mapping[str, Any]) -> dict[str, str]:
    """What is said of each fault of saving."""
    found = {}
    for fault, plant in SAVES.items():
        with plant():
            try:
                halves(rank, folder, [{**choices, "output_dir": str(folder / fault)}])
            except CheckpointError as error:
                found[fault] = str(error)
    return found


def test_experts_that_are_saved_never_or_twice_are_refused(folder: Path) -> None:
    choices = {**BASE, **divided(2, data=4)}
    for found in run_ranks(4, saved_wrongly, folder, choices):
        for fault, wanted in (("never", "only a part of it"), ("twice", "elements that are in")):
            assert "blocks.0.mlp.experts.gate" in found[fault]
            assert wanted in found[fault]
