"""Many ranks save into one checkpoint, each piece once; any other layout reads it; no failure costs what was there."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kitforge.core.checkpoint import load, safetensors_file, snapshot
from kitforge.core.checkpoint.load import newest, open_checkpoint
from kitforge.core.checkpoint.manifest import read_manifest, step_folder, steps
from kitforge.core.checkpoint.save import CheckpointWriter
from kitforge.core.parallel.config import ParallelConfig
from kitforge.core.parallel.grid import Grid
from kitforge.core.parallel.layout import Layout
from kitforge.foundation.errors import CheckpointError, PeerError, TrainingError
from kitforge.foundation.types import Region
from kitforge.verify import killing
from tests.core.checkpoint import example, sharded
from tests.core.checkpoint.example import assert_equal
from tests.distributed.ranks import run_ranks
from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

SQUARE = ParallelConfig(shard=2, tensor=2)
PAIR = ParallelConfig(shard=2)
COPIES = ParallelConfig(data=2)
TARGETS = [
    ParallelConfig(tensor=2),
    ParallelConfig(shard=3),
    ParallelConfig(tensor=4),
    ParallelConfig(shard=4),
    ParallelConfig(),
    SQUARE,
]


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 3 and 6, saved by four ranks; to be read and never written."""
    root = tmp_path_factory.mktemp("square")
    run_ranks(4, sharded.save_steps, root, SQUARE, 3, 6)
    return root


@pytest.fixture
def copy(square: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(square, tmp_path / "copy"))


def hidden(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("target", TARGETS, ids=ParallelConfig.describe)
def test_any_layout_reads_what_another_saved_to_the_bit(square: Path, target: ParallelConfig) -> None:
    checkpoint = open_checkpoint(square / "step_6")
    for place in Grid.of(target).coordinates:
        sharded.assert_pieces(checkpoint, target, place)


def test_one_process_reads_the_whole_to_the_bit(square: Path) -> None:
    sharded.assert_whole(open_checkpoint(square / "step_6"))


@pytest.mark.parametrize("target", TARGETS, ids=ParallelConfig.describe)
def test_any_layout_reads_what_one_process_saved(tmp_path: Path, target: ParallelConfig) -> None:
    writer = CheckpointWriter(tmp_path)
    model, optimizer = sharded.whole_model(2), sharded.whole_optimizer(2)
    writer.save(2, model=model.items(), optimizer=optimizer.items(), state={"step": 2})
    writer.close()
    for place in Grid.of(target).coordinates:
        sharded.assert_pieces(open_checkpoint(tmp_path / "step_2"), target, place)


def test_every_byte_is_written_once(square: Path) -> None:
    files = list((square / "step_6").glob("*.safetensors"))
    stored = 0
    for path in files:
        file = safetensors_file.TensorFile(path, CheckpointError)
        stored += sum(file.tensor(name).nbytes for name in file.names())
    wholes = {id(tensor): tensor for tensor in sharded.whole_model(6).values()}
    moments = sharded.whole_optimizer(6).values()
    assert stored == sum(tensor.nbytes for tensor in (*wholes.values(), *moments))


def test_every_rank_writes_its_own_files(square: Path) -> None:
    names = sorted(path.name for path in (square / "step_6").glob("*.safetensors"))
    parts = ("model", "optimizer")
    assert names == [f"{part}-r{rank:05}-00001.safetensors" for part in parts for rank in range(4)]
    assert hidden(square) == []


def test_tied_tensors_are_stored_once_and_read_under_both_names(square: Path) -> None:
    checkpoint = open_checkpoint(square / "step_6")
    alias, owner = sharded.TIED
    assert checkpoint.entry(alias).alias_of == owner
    assert checkpoint.tensor(alias).equal(checkpoint.tensor(owner))


def test_a_slice_that_is_just_what_is_asked_for_is_mapped_and_not_copied(square: Path) -> None:
    checkpoint = open_checkpoint(square / "step_6")
    entry = list(checkpoint.entry("up.weight").slices())[1]
    region = Region(global_shape=entry.global_shape, offset=entry.offset, shape=entry.shape)
    assert checkpoint.read("up.weight", region).data_ptr() == checkpoint.read("up.weight", region).data_ptr()


def test_a_part_of_a_tensor_of_another_shape_is_refused(square: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'up.weight'(.|\n)*another shape\n.*\[10, 6\]\n.*\[12, 6\]"):
        open_checkpoint(square / "step_6").read("up.weight", Region.full((12, 6)))


def test_a_part_that_reaches_beyond_the_tensor_is_refused(square: Path) -> None:
    beyond = Region(global_shape=(10, 6), offset=(8, 0), shape=(3, 6))
    with pytest.raises(CheckpointError, match="no such part"):
        open_checkpoint(square / "step_6").read("up.weight", beyond)


# What is wrong with a shard file, and what is said of it.


def remove(path: Path, _other: Path) -> None:
    path.unlink()


def truncate(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


def flip(path: Path, _other: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def take_from_other_step(path: Path, other: Path) -> None:
    shutil.copy(other, path)


DAMAGES = [(remove, "is missing"), (truncate, "is truncated"), (flip, "is damaged"), (take_from_other_step, "step")]


@pytest.mark.parametrize(("damage", "told"), DAMAGES)
def test_a_damaged_shard_is_named_and_the_step_before_is_used(
    copy: Path, damage: Callable[[Path, Path], None], told: str
) -> None:
    name = "model-r00002-00001.safetensors"
    damage(copy / "step_6" / name, copy / "step_3" / name)
    messages: list[str] = []
    checkpoint = newest(copy, on_damaged=lambda error: messages.append(str(error)))
    assert checkpoint is not None
    assert checkpoint.step == 3
    sharded.assert_whole(checkpoint)
    assert [name in message and told in message for message in messages] == [True]


def test_a_shard_of_another_step_tells_both_steps(copy: Path) -> None:
    name = "model-r00002-00001.safetensors"
    take_from_other_step(copy / "step_6" / name, copy / "step_3" / name)
    with pytest.raises(CheckpointError, match=f"{name} is of another step\n  got:      3\n  expected: 6"):
        open_checkpoint(copy / "step_6")


@pytest.mark.parametrize("damage", [remove, truncate, take_from_other_step])
def test_an_unverified_damage_is_told_with_the_tensor_or_the_file_when_it_is_read(
    copy: Path, damage: Callable[[Path, Path], None]
) -> None:
    name = "model-r00003-00001.safetensors"
    damage(copy / "step_6" / name, copy / "step_3" / name)
    checkpoint = open_checkpoint(copy / "step_6", verify=False)
    with pytest.raises(CheckpointError, match=name) as caught:
        checkpoint.tensor("down.weight")
    assert damage is truncate or "'down.weight'" in str(caught.value)


# What ranks do together.


def read_newest(_rank: int, root: Path, degrees: ParallelConfig) -> tuple[int, list[str]]:
    told: list[str] = []
    world = sharded.world_of(degrees)
    checkpoint = newest(root, on_damaged=lambda error: told.append(str(error)), world=world)
    assert checkpoint is not None and world.mesh is not None
    sharded.assert_pieces(checkpoint, degrees, world.mesh.index)
    return checkpoint.step, told


def test_ranks_load_under_a_layout_with_uneven_pieces(square: Path) -> None:
    assert run_ranks(3, read_newest, square, ParallelConfig(shard=3)) == [(6, [])] * 3


def test_damage_that_one_rank_finds_is_told_on_all_and_all_go_back_together(copy: Path) -> None:
    flip(copy / "step_6" / "optimizer-r00001-00001.safetensors", copy)
    first, second = run_ranks(2, read_newest, copy, ParallelConfig(tensor=2))
    assert first == second
    assert first[0] == 3
    assert "optimizer-r00001-00001.safetensors is damaged" in first[1][0]


def verified_names(_rank: int, folder: Path) -> list[str]:
    seen: list[str] = []

    def watched(path: Path) -> str:
        seen.append(path.name)
        return safetensors_file.crc32(path)

    load.crc32 = watched
    open_checkpoint(folder, world=sharded.world_of(PAIR))
    return seen


def test_every_file_is_verified_by_one_rank(square: Path) -> None:
    first, second = run_ranks(2, verified_names, square / "step_6")
    assert sorted(first + second) == sorted(path.name for path in (square / "step_6").glob("*.safetensors"))
    assert len(first) == len(second)


def save_while_training(rank: int, root: Path) -> float:
    world = sharded.world_of(PAIR)
    gate, write = threading.Event(), safetensors_file.write_shard

    def wait_and_write(*arguments: Any) -> Any:
        assert gate.wait(timeout=PATIENCE)
        return write(*arguments)

    safetensors_file.write_shard = wait_and_write
    writer = CheckpointWriter(root, world=world)
    weight = torch.full((2,), float(rank))
    layout = Layout(shape=(4,)).split("shard", 0, 2)
    writer.save(1, model=[("weight", weight)], optimizer=[], state={}, layouts={"weight": layout})
    # The training goes on with its own words while the background has begun with its own.
    for _ in range(20):
        weight += 1
        dist.all_reduce(weight)
    gate.set()
    writer.close()
    return float(weight[0])


def test_words_of_the_background_do_not_mix_with_the_trainings(tmp_path: Path) -> None:
    first, second = run_ranks(2, save_while_training, tmp_path)
    assert first == second
    assert open_checkpoint(tmp_path / "step_1").tensor("weight").tolist() == [0, 0, 1, 1]


def keep_and_delete(_rank: int, root: Path) -> None:
    world = sharded.world_of(COPIES)
    writer = CheckpointWriter(root, keep_last=1, world=world, asynchronous=False)
    sharded.save(writer, 1, COPIES, world, keep=True)
    for step in (2, 3):
        sharded.save(writer, step, COPIES, world)
    writer.pin(3)
    writer.unpin(1)
    for step in (4, 5):
        sharded.save(writer, step, COPIES, world)
    writer.close()


def test_steps_are_kept_and_deleted_by_rule(tmp_path: Path) -> None:
    run_ranks(2, keep_and_delete, tmp_path)
    assert steps(tmp_path) == [3, 5]
    assert hidden(tmp_path) == []


def test_copies_share_the_writing(tmp_path: Path) -> None:
    run_ranks(2, sharded.save_steps, tmp_path, COPIES, 1)
    sharded.assert_whole(open_checkpoint(tmp_path / "step_1"))
    files = read_manifest(tmp_path / "step_1").files
    sizes = [sum(file.bytes for file in files if f"-r{rank:05}-" in file.name) for rank in range(2)]
    assert min(sizes) > 0.8 * max(sizes)


def save_few(rank: int, root: Path) -> None:
    world = sharded.world_of(ParallelConfig(data=3))
    writer = CheckpointWriter(root, world=world)
    writer.save(1, model=[("weight", torch.ones(4))], optimizer=[("step", torch.tensor(1.0))], state={})
    writer.close()


def test_a_rank_that_answers_for_nothing_writes_no_file(tmp_path: Path) -> None:
    run_ranks(3, save_few, tmp_path)
    assert sorted(path.name for path in (tmp_path / "step_1").glob("*-r*")) == [
        "model-r00000-00001.safetensors",
        "optimizer-r00001-00001.safetensors",
    ]


# What fails on one rank fails on all, and costs only the new step.


def full_on_one(rank: int, root: Path) -> list[str]:
    world = sharded.world_of(PAIR)
    writer = CheckpointWriter(root, world=world)
    sharded.save(writer, 1, PAIR, world)
    writer.wait()
    write = safetensors_file.write_shard

    def fill_up(*arguments: Any) -> Any:
        write(*arguments)
        raise OSError(28, "No space left on device")

    told = []
    if rank == 1:
        safetensors_file.write_shard = fill_up
    sharded.save(writer, 2, PAIR, world)
    try:
        writer.wait()
    except CheckpointError as error:
        told.append(str(error))
    safetensors_file.write_shard = write
    sharded.save(writer, 3, PAIR, world)
    writer.close()
    return told


def test_a_disk_that_is_full_for_one_rank_is_told_on_all_and_costs_one_step(tmp_path: Path) -> None:
    first, second = run_ranks(2, full_on_one, tmp_path)
    assert first == second
    assert len(first) == 1
    assert "step_2 could not be written" in first[0]
    assert "No space left" in first[0]
    assert steps(tmp_path) == [1, 3]
    assert hidden(tmp_path) == []
    for step in (1, 3):
        sharded.assert_whole(open_checkpoint(step_folder(tmp_path, step)))


def save_strangely(rank: int, root: Path, fault: str) -> str:
    world = sharded.world_of(PAIR)
    writer = CheckpointWriter(root, world=world)
    layout = Layout(shape=(5,)).split("shard", 0, 2)
    size = 3 if rank == 0 or fault == "shape" else 2
    model = {"weight": torch.ones(size)}
    if fault == "names" and rank == 1:
        model["bias"] = torch.ones(1)
    if fault == "dtype" and rank == 1:
        model["weight"] = model["weight"].double()
    if fault == "meta" and rank == 1:
        model["weight"] = torch.ones(2, device="meta")
    if fault == "unseen" and rank == 1:
        writer._root = root / "elsewhere"
    try:
        writer.save(1, model=model.items(), optimizer=[], state={}, layouts={"weight": layout})
        writer.close()
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("shape", r"'weight' is not of the shape that its layout gives to rank 1\n.*\[3\]\n.*\[2\]"),
        ("names", "rank 1 saves other tensors than rank 0"),
        ("dtype", "rank 1 saves other tensors than rank 0"),
        ("meta", "'weight' cannot be stored"),
        ("unseen", "rank 1 does not see"),
    ],
)
def test_what_one_rank_cannot_save_is_told_on_all(tmp_path: Path, fault: str, told: str) -> None:
    first, second = run_ranks(2, save_strangely, tmp_path, fault)
    assert first == second
    pytest.raises(CheckpointError, fail, first).match(told)
    assert list(tmp_path.iterdir()) == []


def fail(message: str) -> None:
    raise CheckpointError(message)


def die_while_writing(rank: int, root: Path, victim: int) -> None:
    world = sharded.world_of(PAIR)
    writer = CheckpointWriter(root, world=world)
    sharded.save(writer, 1, PAIR, world)
    writer.wait()
    write = safetensors_file.write_shard

    def half_write(path: Path, *arguments: Any) -> Any:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        safetensors_file.write_shard = half_write
    sharded.save(writer, 2, PAIR, world)
    try:
        writer.wait()
    except PeerError as error:
        (root.parent / "told").write_text(str(error))
    # What the harness says of the death is not of interest, nor that the others miss the dead.
    safetensors_file.write_shard = write
    os._exit(0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_while_writing_leaves_the_step_before(tmp_path: Path, victim: int) -> None:
    root = tmp_path / "checkpoints"
    with pytest.raises(TrainingError, match="died"):
        run_ranks(2, die_while_writing, root, victim)
    assert "another rank died" in (tmp_path / "told").read_text()
    assert steps(root) == [1]
    checkpoint = newest(root, on_damaged=pytest.fail)
    assert checkpoint is not None
    sharded.assert_whole(checkpoint)
    run_ranks(2, sharded.save_steps, root, PAIR, 3)
    assert hidden(root) == []
    sharded.assert_whole(open_checkpoint(root / "step_3"))


def die_at_operation(rank: int, root: Path, victim: int, number: int) -> None:
    world = sharded.world_of(PAIR)
    if rank == victim:
        killing.die_at_operation(number, root)
    writer = CheckpointWriter(root, keep_last=1, world=world)
    try:
        for step in (1, 2, 2, 3):
            sharded.save(writer, step, PAIR, world)
        writer.close()
    except PeerError:
        os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "numbers"), [(0, range(0, 100, 7)), (1, range(0, 36, 4))])
def test_the_newest_is_whole_after_a_kill_at_any_file_operation_of_any_rank(
    tmp_path: Path, victim: int, numbers: range
) -> None:
    reached = []
    for number in numbers:
        root = tmp_path / f"{number}"
        with suppress(TrainingError, PeerError):
            run_ranks(2, die_at_operation, root, victim, number)
        checkpoint = newest(root, on_damaged=pytest.fail)
        if checkpoint is not None:
            sharded.assert_whole(checkpoint)
        reached.append(0 if checkpoint is None else checkpoint.step)
        for step in steps(root):
            sharded.assert_whole(open_checkpoint(step_folder(root, step)))
    # A rank that lived longer never leaves an older newest step, and the deaths were spread over the saves.
    assert reached == sorted(reached)
    assert {0, 1, 2} <= set(reached)


# Planted faults: each is caught before anything is published.


def save_with_fault(rank: int, root: Path, fault: str) -> str:
    if fault == "everybody writes":
        snapshot.assign_shards = lambda tensors, _ranks, _rank: [True] * len(tensors)
    if fault == "nobody writes":
        snapshot.assign_shards = lambda tensors, _ranks, _rank: [False] * len(tensors)
    if fault == "last piece too short":
        region = Layout.region

        def shorter(layout: Layout, index: Any) -> Region:
            found = region(layout, index)
            if found.shape == found.global_shape or not found.shape or found.offset[0] == 0:
                return found
            shape = (max(found.shape[0] - 1, 0), *found.shape[1:])
            return Region(global_shape=found.global_shape, offset=found.offset, shape=shape)

        Layout.region = shorter  # type: ignore[method-assign]
    degrees = COPIES if fault == "everybody writes" else PAIR
    try:
        sharded.save_steps(rank, root, degrees, 1)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("everybody writes", "elements that are in model-r00000-00001.safetensors and in model-r00001"),
        ("nobody writes", "no rank has written"),
        ("last piece too short", "only a part of it"),
        ("none", "saved"),
    ],
)
def test_a_planted_fault_of_the_cutting_is_caught(tmp_path: Path, fault: str, told: str) -> None:
    for message in run_ranks(2, save_with_fault, tmp_path, fault):
        assert told in message
    assert steps(tmp_path) == ([1] if fault == "none" else [])


def test_what_one_process_saves_is_what_it_always_was(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    assert sorted(path.name for path in folder.iterdir()) == [
        "manifest.json",
        "model-00001-of-00001.safetensors",
        "optimizer-00001-of-00001.safetensors",
        "state.json",
    ]
    assert "crc32" not in (folder / "manifest.json").read_text()
    assert_equal(dict(open_checkpoint(folder).model()), example.model(1))


def test_one_process_refuses_layouts_that_are_split(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(CheckpointError, match="'weight' is split"):
        layout = Layout(shape=(4,)).split("shard", 0, 2)
        writer.save(1, model=[("weight", torch.ones(2))], optimizer=[], state={}, layouts={"weight": layout})
    assert steps(tmp_path) == []
