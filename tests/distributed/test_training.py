"""Whole runs on several ranks equal the run of one process, whatever the mesh, and go on under another.

One launch for each number of ranks trains all runs of that number.
"""

import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.manifest import step_folder, steps
from kitforge.core.optim import muon
from kitforge.core.parallel import micro_batches
from kitforge.foundation.errors import PeerError, TrainingError
from kitforge.trainer.run_folder import train
from kitforge.verify.run_equality import copy_up_to
from tests.differential.drawn import WHOLE
from tests.distributed.ranks import ask_ranks, run_ranks
from tests.distributed.training import (
    BASE,
    MIXTURE,
    assert_log_of_one_process,
    numbers,
    ready,
    run_training,
    world_size,
    write_text,
)
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

HALF, LENGTH = 2, BASE["data.sequence_length"]
GPT2 = {
    "model": "gpt2_tiny",
    "model.dim": 32,
    "model.num_layers": 4,
    "model.num_heads": 4,
    "model.embedding_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.residual_dropout": 0.1,
}
KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1},
    "muon": {"optimizer.name": "muon"},
    "micro-batches": {"trainer.micro_batch_size": 2},
    "dropout": {**GPT2, "trainer.checkpoint_every": HALF},
    "documents and dropout": {**GPT2, "data.separator": ", "},
    "two heads": {"model.num_heads": 2, "model.num_kv_heads": 1, "data.separator": ", "},
    # Ranks run dry within a step, and the last step of the epoch is smaller.
    "fewer rows than ranks": {"data.batch_size": 3, "trainer.epochs": 0.05, "trainer.max_steps": None},
    "experts": {**MIXTURE, "data.batch_size": 3, "trainer.max_steps": 4},
    "experts with a bias": {
        **MIXTURE,
        "model.experts.balance": "bias",
        "model.experts.bias_rate": 0.05,
        "optimizer.learning_rate": 2e-3,
        "trainer.max_steps": 3,  # an odd number of equal steps up and down
    },
}


def mesh(**degrees: Any) -> dict[str, Any]:
    return {f"parallel.{name}": degree for name, degree in degrees.items()}


SQUARE, CUT, STAGES = mesh(shard=2, tensor=2), mesh(shard=2, context=2), mesh(pipeline=2, shard=2)
# With more micro-batches than stages on some of the ranks.
STAGED = STAGES | {"trainer.micro_batch_size": 1}
IN_A_V = STAGED | mesh(zero_stage=2, schedule="zero_bubble_v")
# The gate has every axis, every pair of them and every kind of run.
CASES: list[tuple[str, dict[str, Any]]] = [
    ("adamw", mesh(data=2, shard=2)),
    ("sgd", mesh(data=2, context=2) | {"trainer.micro_batch_size": 2}),
    ("muon", mesh(shard=2, zero_stage=1)),
    ("muon", CUT | {"data.sequence_length": 15}),
    ("dropout", SQUARE),
    ("dropout", CUT),
    ("dropout", IN_A_V),
    ("dropout", mesh(pipeline=2, tensor=2, schedule="interleaved") | {"trainer.micro_batch_size": 1}),
    ("fewer rows than ranks", mesh(pipeline=2, data=2)),
    ("experts with a bias", mesh(pipeline=2) | {"trainer.micro_batch_size": 2}),
    ("documents and dropout", mesh(context=2, tensor=2, copies=2)),
    ("fewer rows than ranks", mesh(data=4)),
    # One rank has a dry row in every step.
    ("experts", mesh(data=2, tensor=2)),
    ("experts", {"trainer.micro_batch_size": 1}),
    ("experts with a bias", mesh(context=2, copies=2)),
    ("two heads", mesh(context=4, context_by="keys")),
]
if WHOLE:
    CASES += [
        ("dropout", STAGED),
        ("muon", mesh(pipeline=2)),
        ("experts with a bias", mesh(shard=2) | {"trainer.micro_batch_size": 2}),
    ]
    MESHES = [
        *(mesh(data=degree) for degree in (2, 4)),
        *(mesh(shard=degree) for degree in (2, 3)),
        mesh(shard=2, zero_stage=1),
        mesh(tensor=2),
        mesh(tensor=4, sequence_parallel=False),
        *({first: 2, second: 2} for first, second in itertools.combinations(mesh(data=2, shard=2, tensor=2), 2)),
        *(mesh(context=2, **other) for other in ({}, {"tensor": 2}, {"shard": 2}, {"data": 2})),
        *(mesh(tensor=2, copies=2, **other) for other in ({}, {"data": 2}, {"shard": 2, "zero_stage": 2})),
    ]
    # One head of keys is on one rank.
    product = (
        case for case in itertools.product(KINDS, MESHES) if case[0] != "two heads" or "tensor" not in str(case[1])
    )
    CASES += [case for case in product if case not in CASES]
# From the checkpoint of one mesh on another; the weights of the run that goes on where it was are those to the bit.
# Rank 1 of this one is killed in the step after its checkpoint.
KILLED = mesh(pipeline=2) | {"trainer.checkpoint_every": HALF}
GOES_ON: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(("dropout", SQUARE, later) for later in (SQUARE, {}, mesh(shard=3))),
    ("dropout", CUT, mesh(context=2, tensor=2)),
    *(("dropout", IN_A_V, later) for later in (IN_A_V, STAGED)),
    ("muon", KILLED, mesh(tensor=2)),
]
if WHOLE:
    GOES_ON += [("muon", KILLED, {}), *(("dropout", STAGED, later) for later in (STAGED, {}, mesh(tensor=2)))]
POISONED = [mesh(data=2), mesh(shard=2)]


@pytest.fixture(autouse=True, scope="module")
def exact() -> Iterator[None]:
    """Muon's products in fp32 on every machine: in bf16 what rounding leaves between layouts grows to 5e-5. Slices take
    turns in all steps, small as their messages are."""
    with (
        mock.patch.object(muon, "has_native_matmul", lambda *_: False),
        mock.patch.object(micro_batches, "SLICE_BYTES", 0),
    ):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


@functools.cache
def alone(folder: Path, kind: str, length: int) -> list[dict[str, Any]]:
    """The log of one process."""
    own = {"data.sequence_length": length, "output_dir": str(folder / f"{kind} alone {length}")}
    return run_training(0, folder, {**KINDS[kind], **own})[0]


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[Any, list[Any]]:
    """Of each case and each poisoned run what its ranks return."""
    questions: dict[Any, tuple[Any, ...]] = {}
    for kind, choices in CASES:
        given = {**KINDS[kind], **choices, "output_dir": str(place_of(folder, kind, choices))}
        questions[kind, str(choices)] = (world_size(choices), run_training, folder, given)
    for number, choices in enumerate(POISONED):
        questions[str(choices)] = (2, poisoned, folder, {**choices, "output_dir": str(folder / f"poisoned {number}")})
    return ask_ranks(questions)


@pytest.fixture(scope="module")
def killed(folder: Path) -> Path:
    """A run whose second stage was killed in the step after its checkpoint."""
    place = folder / "killed"
    with pytest.raises(TrainingError, match="died"):
        run_ranks(2, train_and_kill, folder, {**KINDS["muon"], **KILLED, "output_dir": str(place)})
    assert steps(place / "checkpoints") == [HALF]
    return place


def train_and_kill(rank: int, folder: Path, choices: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    assembly, _ = ready(rank, folder, choices)
    honest, root = assembly.loop.task.steps, assembly.folder / "checkpoints"

    def watched(*given: Any) -> Iterator[Any]:
        for number, step in enumerate(honest(*given)):
            if rank == 1 and number == HALF + 1:
                until = time.monotonic() + PATIENCE
                while not steps(root) and time.monotonic() < until:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            yield step

    assembly.loop.task.steps = watched  # type: ignore[method-assign]
    # What the other rank says of the death is not of interest.
    with suppress(RuntimeError, PeerError):
        train(assembly.loop, assembly.options, assembly.folder, assembly.config_text)
    os._exit(0)


@pytest.fixture(scope="module")
def continued(folder: Path, runs: dict[Any, list[Any]], killed: Path) -> dict[Any, list[Any]]:
    questions: dict[Any, tuple[Any, ...]] = {}
    for number, (kind, first, later) in enumerate(GOES_ON):
        source = killed if first is KILLED else place_of(folder, kind, first)
        copy = copy_up_to(source, folder / f"continued {number}", HALF)
        given = {**KINDS[kind], **later, "output_dir": str(copy), "resume": "auto"}
        questions[str((kind, first, later))] = (world_size(later), run_training, folder, given)
        if "parallel.pipeline" in first:
            questions["moments", str((kind, first, later))] = (world_size(later), moments, folder, given)
    return ask_ranks(questions)


def moments(rank: int, folder: Path, choices: Mapping[str, Any]) -> list[bool]:
    """Of each state of the optimizer, as this rank loads it, whether it has the bits of the checkpoint."""
    loop = ready(rank, folder, choices)[0].loop
    saved = open_checkpoint(step_folder(Path(choices["output_dir"]) / "checkpoints", HALF))
    loop.resume(saved)
    whole, regions = dict(saved.optimizer()), loop.state.parallel.regions(loop.state.layouts())
    own = dict(loop.state.optimizer.tensors())
    return [torch.equal(each, regions[name].of(whole[name])) for name, each in own.items()]


def place_of(folder: Path, kind: str, choices: Mapping[str, Any]) -> Path:
    return folder / f"{kind} {CASES.index((kind, dict(choices)))}"


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "choices"), CASES, ids=str)
def test_a_run_of_ranks_is_that_of_one_process(
    folder: Path, runs: dict[Any, list[Any]], kind: str, choices: dict[str, Any]
) -> None:
    one = alone(folder, kind, choices.get("data.sequence_length", LENGTH))
    for lines, pieces in runs[kind, str(choices)]:
        assert_log_of_one_process(lines, one, "tokens")
        if "experts" in kind:
            for name in ("experts/load/0", "experts/load/3", "experts/fullest"):
                assert numbers(lines, name) == numbers(one, name)
            means = [
                sum(line[f"experts/load/{each}"] for each in range(4)) / 4 for line in lines if "grad_norm" in line
            ]
            assert means == pytest.approx([1.0] * len(means))
            biases = [each for name, each in pieces.items() if name.endswith("router.bias") and each.numel()]
            assert not biases or any(each.any() for each in biases)


@pytest.mark.parametrize(("kind", "first", "later"), GOES_ON, ids=str)
def test_a_run_goes_on_under_another_mesh(
    folder: Path, continued: dict[str, list[Any]], kind: str, first: dict[str, Any], later: dict[str, Any]
) -> None:
    wanted = numbers(alone(folder, kind, LENGTH), "loss")[HALF:]
    for lines, _ in continued[str((kind, first, later))]:
        # Eight of the last digits of fp32, on processors that sum products in another order.
        assert numbers(lines, "loss") == pytest.approx(wanted, abs=2e-6 if first is KILLED else 6e-6)


@pytest.mark.prove
@pytest.mark.parametrize("mesh", [SQUARE, IN_A_V, *([STAGED] if WHOLE else [])], ids=str)
def test_resuming_on_the_same_mesh_is_exact(
    runs: dict[Any, list[Any]], continued: dict[str, list[Any]], mesh: dict[str, Any]
) -> None:
    whole = runs["dropout", str(mesh)]
    for (lines, weights), (expected_lines, expected) in zip(
        continued[str(("dropout", mesh, mesh))], whole, strict=True
    ):
        assert numbers(lines, "loss") == numbers(expected_lines, "loss")[HALF:]
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


@pytest.mark.parametrize("which", [each for each in GOES_ON if "parallel.pipeline" in each[1]], ids=str)
def test_moments_of_stages_are_loaded_bit_for_bit(continued: dict[Any, list[Any]], which: tuple[Any, ...]) -> None:
    for found in continued["moments", str(which)]:
        assert len(found) > 10
        assert all(found)


def poisoned(rank: int, folder: Path, choices: Mapping[str, Any]) -> tuple[int, int, float]:
    """One rank's loss is not finite in step 2."""
    assembly, _ = ready(rank, folder, choices)
    loop, task = assembly.loop, assembly.loop.task
    honest = task.loss

    def loss(model: Any, micro_batch: Any) -> Any:
        sums = honest(model, micro_batch)
        is_bad = rank == 1 and micro_batch["step"] == 2
        return {name: value * float("inf") if is_bad else value for name, value in sums.items()}

    task.loss = loss  # type: ignore[method-assign]
    loop.train()
    norm = sum(float(piece.detach().norm()) for piece in loop.state.parallel.parameters().values())
    return loop.state.skipped, loop.state.updates, norm


@pytest.mark.parametrize("choices", POISONED, ids=str)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all(
    runs: dict[Any, list[Any]], choices: dict[str, Any]
) -> None:
    for skipped, updates, norm in runs[str(choices)]:
        assert (skipped, updates) == (1, 3)
        assert norm < 1e6
