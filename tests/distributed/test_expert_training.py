"""Whole runs with divided experts equal the run of one process, and go on under any other division of the ranks.

One launch for each number of ranks and stage of the story runs all of its runs.
"""

import functools
import itertools
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
from kitforge.verify.run_equality import copy_up_to
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks
from tests.distributed.training import (
    MIXTURE,
    assert_log_of_one_process,
    numbers,
    ready,
    run_training,
    train,
    world_size,
    write_text,
)

pytestmark = pytest.mark.slow

HALF = 2
BASE = MIXTURE | {"data.batch_size": 5, "trainer.checkpoint_every": HALF}
BIAS = {
    **BASE,
    "model.experts.balance": "bias",
    "model.experts.bias_rate": 0.05,
    "optimizer.learning_rate": 2e-3,
    "trainer.max_steps": 3,  # an odd number of equal steps up and down
}
KINDS = {"sequence": BASE, "bias": BIAS, "sgd": BASE | {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1}}


def divided(expert: int, **degrees: int) -> dict[str, Any]:
    return {f"parallel.{name}": degree for name, degree in degrees.items()} | {"parallel.expert": expert}


# A rank has a dry row in some step; capacity and recomputation; copies of experts, sharded or not.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sequence", divided(2, data=2) | {"trainer.micro_batch_size": 1, "trainer.activation_checkpointing": "full"}),
    ("bias", divided(2, shard=2) | {"trainer.micro_batch_size": 2, "trainer.activation_checkpointing": "selective"}),
    ("sequence", divided(2, data=2, tensor=2)),
    ("bias", divided(2, data=2, context=2)),
    ("sgd", divided(4, shard=2, context=2)),
    ("sequence", divided(2, shard=4)),
]
# Those whose checkpoints others go on from: of one process and of ranks.
FIRST: list[dict[str, Any]] = [{}, CASES[2][1], CASES[5][1]]
LATER: list[dict[str, Any]] = [
    {},
    divided(1, tensor=2),
    divided(2, shard=2),
    divided(2, data=2, tensor=2),
    divided(4, data=4),
    divided(2, shard=2, context=2),
]
# Every other one goes on from one, beside the whole product.
RESUMED = [
    (first, later)
    for later, first in itertools.product(range(len(LATER)), range(len(FIRST)))
    if WHOLE or (later % 2 == 0 and first == (later + 1) % len(FIRST))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


@functools.cache
def alone(folder: Path, kind: str) -> list[dict[str, Any]]:
    return run_training(0, folder, {**KINDS[kind], "output_dir": str(place_of(folder, kind, {}))})[0]


def place_of(folder: Path, kind: str, choices: Mapping[str, Any]) -> Path:
    return folder / f"{kind} {CASES.index((kind, dict(choices))) if choices else 'alone'}"


def resumed(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The log of a run that goes on, and the tensors that this rank has not read to the bit."""
    assembly, told = ready(rank, folder, choices | {"resume": "auto"})
    checkpoint = open_checkpoint(Path(choices["output_dir"]) / "checkpoints" / f"step_{HALF}")
    state = assembly.loop.state
    assembly.loop.resume(checkpoint)
    pieces = {**dict(state.parallel.tensors()), **dict(state.optimizer.tensors())}
    regions = state.parallel.regions(state.layouts())
    wanted = {name: checkpoint.tensor(name) for name in pieces}
    wrong = [
        name
        for name, piece in pieces.items()
        if not torch.equal(piece, regions[name].of(wanted[name]) if name in regions else wanted[name])
    ]
    train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    return told.lines, wrong


def refused(rank: int, folder: Path, choices: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        run_training(rank, folder, choices)
    return str(error.value)


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Any, list[Any]]:
    """Of each case what its ranks return, and what is said of those that are refused."""
    questions: dict[Any, tuple[Any, ...]] = {}
    for number, (kind, choices) in enumerate(CASES):
        given = {**KINDS[kind], **choices, "output_dir": str(place_of(folder, kind, choices))}
        questions[number] = (world_size(choices), run_training, folder, given)
    replicas = {**BASE, "data.batch_size": 4, "model.experts.balance": "batch", "output_dir": str(folder / "replicas")}
    questions["refused"] = (2, refused, folder, replicas | divided(1, data=2))
    questions["saved wrongly"] = (4, saved_wrongly, folder, {**BASE, **divided(2, data=4), "trainer.max_steps": 2})
    return ask_ranks(questions)


def test_a_step_of_two_replicas_is_not_balanced_over_the_batch_of_each(runs: dict[Any, list[Any]]) -> None:
    for found in runs["refused"]:
        assert "1 micro-batches a step on each of 2 replicas" in found


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: str(CASES[number]))
def test_runs_with_divided_experts_are_those_of_one_process(
    folder: Path, runs: dict[Any, list[Any]], number: int
) -> None:
    names = ("experts/load/0", "experts/load/3", "experts/fullest", "experts/dropped")
    for lines, _ in runs[number]:
        assert_log_of_one_process(lines, alone(folder, CASES[number][0]), *names)


@pytest.fixture(scope="module")
def continued(folder: Path, runs: dict[Any, list[Any]]) -> dict[Any, list[Any]]:
    alone(folder, "sequence")
    questions = {}
    for first, later in RESUMED:
        copy = copy_up_to(place_of(folder, "sequence", FIRST[first]), folder / f"{first} to {later}", HALF)
        given = {**BASE, **LATER[later], "output_dir": str(copy)}
        questions[first, later] = (world_size(LATER[later]), resumed, folder, given)
    return ask_ranks(questions)


@pytest.mark.prove
@pytest.mark.parametrize(("first", "later"), RESUMED)
def test_a_run_goes_on_under_any_other_division(
    folder: Path, continued: dict[Any, list[Any]], first: int, later: int
) -> None:
    for lines, wrong in continued[first, later]:
        assert not wrong
        assert numbers(lines, "loss") == pytest.approx(numbers(alone(folder, "sequence"), "loss")[HALF:], abs=2e-6)


def test_every_expert_is_saved_once(folder: Path, runs: dict[Any, list[Any]]) -> None:
    alone(folder, "sequence")
    stored = []
    for choices in FIRST:
        place = place_of(folder, "sequence", choices) / "checkpoints" / f"step_{HALF}"
        files = [safetensors_file.TensorFile(path, CheckpointError) for path in place.glob("*.safetensors")]
        stored.append(sum(file.tensor(name).nbytes for file in files for name in file.names()))
        checkpoint = open_checkpoint(place)
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
                run_training(rank, folder, {**choices, "output_dir": str(folder / fault)})
            except CheckpointError as error:
                found[fault] = str(error)
    return found


def test_experts_that_are_saved_never_or_twice_are_refused(runs: dict[Any, list[Any]]) -> None:
    for found in runs["saved wrongly"]:
        for fault, wanted in (("never", "only a part of it"), ("twice", "elements that are in")):
            assert "blocks.0.mlp.experts.gate" in found[fault]
            assert wanted in found[fault]
