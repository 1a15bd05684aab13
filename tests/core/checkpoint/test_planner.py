"""torch.distributed.checkpoint reads and writes our checkpoints, through its own planners."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from kitforge.core.checkpoint.layout import read_manifest
from kitforge.core.checkpoint.load import open_checkpoint
from kitforge.core.checkpoint.planner import KitforgeReader, KitforgeWriter
from kitforge.core.parallel.degrees import Degrees
from kitforge.foundation.errors import CheckpointError
from tests.core.checkpoint import example, sharded
from tests.distributed.ranks import run_ranks


def wholes() -> dict[str, Tensor]:
    """Rows that two ranks cannot share evenly, columns that they can, a vector of one, a counter, nothing."""
    return {
        "rows": torch.arange(15.0).reshape(5, 3),
        "columns": torch.arange(8).reshape(2, 4),
        "one": torch.ones(1, dtype=torch.bfloat16),
        "none": torch.ones(0, 3),
        "optimizer.rows.exp_avg": torch.arange(15.0).reshape(5, 3) / 3,
        "optimizer.rows.step": torch.tensor(7.0),
    }


def distributed(tensors: dict[str, Tensor], dims: dict[str, int | None]) -> dict[str, Any]:
    """The tensors as DTensors on all ranks: split along a dim, copied, or (not named) plain."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    return {
        name: distribute_tensor(tensor, mesh, [Replicate() if dims[name] is None else Shard(dims[name])])
        if name in dims
        else tensor
        for name, tensor in tensors.items()
    }


SAVED = {"rows": 0, "columns": 1, "one": 0, "optimizer.rows.exp_avg": 0, "none": 1}
LOADED = {"rows": 1, "columns": 0, "optimizer.rows.exp_avg": None, "optimizer.rows.step": None}


def quietly(work: Callable[[], Any]) -> Any:
    """Alone, torch says each time that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        return work()


def save_on(_rank: int, folder: Path) -> None:
    dcp.save(distributed(wholes(), SAVED), storage_writer=KitforgeWriter(folder, step=4, state={"note": "é"}))


def load_on(_rank: int, folder: Path) -> dict[str, Tensor]:
    world = sharded.world_of(Degrees(shard=2))
    empty = {name: torch.full_like(tensor, 9) for name, tensor in wholes().items()}
    targets = distributed(empty, LOADED)
    dcp.load(targets, storage_reader=KitforgeReader(folder, world=world))
    return {name: target.full_tensor() if name in LOADED else target for name, target in targets.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written by two ranks; to be read and never written."""
    place = tmp_path_factory.mktemp("planner") / "step_4"
    run_ranks(2, save_on, place)
    return place


def sorted_by_name(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(tensors.items()))


def test_what_torch_saves_on_two_ranks_is_a_checkpoint_of_ours(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    loaded = dict(checkpoint.model()) | dict(checkpoint.optimizer())
    example.assert_equal(sorted_by_name(loaded), sorted_by_name(wholes()))
    assert sorted(checkpoint.names("optimizer")) == ["optimizer.rows.exp_avg", "optimizer.rows.step"]
    assert (checkpoint.step, checkpoint.state) == (4, {"note": "é"})


def test_torch_loads_in_one_process_what_it_saved_on_two(folder: Path) -> None:
    targets = {name: torch.full_like(tensor, 9) for name, tensor in wholes().items()}
    quietly(lambda: dcp.load(targets, storage_reader=KitforgeReader(folder)))
    example.assert_equal(targets, wholes())


def test_torch_loads_under_other_placements(folder: Path) -> None:
    for loaded in run_ranks(2, load_on, folder):
        example.assert_equal(loaded, wholes())


def test_torch_loads_under_other_placements_what_we_saved_on_a_mesh(tmp_path: Path) -> None:
    run_ranks(4, sharded.save_steps, tmp_path, Degrees(shard=2, tensor=2), 5)
    expected = sharded.whole_model(5) | sharded.whole_optimizer(5)
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    quietly(lambda: dcp.load(targets, storage_reader=KitforgeReader(tmp_path / "step_5")))
    example.assert_equal(targets, expected)


def test_every_piece_is_written_once_and_nothing_is_left_beside(folder: Path) -> None:
    manifest = read_manifest(folder)
    stored = [(each.name, each.offset) for entry in (*manifest.model, *manifest.optimizer) for each in entry.slices()]
    assert len(stored) == len(set(stored))
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(file.name for file in manifest.files)}
    assert [path.name for path in folder.parent.iterdir()] == ["step_4"]


def test_one_process_saves_and_replaces(tmp_path: Path) -> None:
    folder = tmp_path / "any name"
    for value in (1.0, 2.0):
        writer = KitforgeWriter(folder, step=1)
        quietly(lambda writer=writer, value=value: dcp.save({"x": torch.tensor(value)}, storage_writer=writer))
    assert open_checkpoint(folder).tensor("x").item() == 2
    assert [path.name for path in tmp_path.iterdir()] == ["any name"]


def test_what_would_have_to_be_pickled_is_refused(tmp_path: Path) -> None:
    writer = KitforgeWriter(tmp_path / "step_1", step=1)
    with pytest.raises(CheckpointException, match="only tensors can be saved among tensors(.|\n)*rate") as caught:
        quietly(lambda: dcp.save({"x": torch.ones(1), "rate": 0.1}, storage_writer=writer))
    assert isinstance(caught.value.failures[0][0], CheckpointError)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tensor_is_told(folder: Path) -> None:
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: other"):
        quietly(lambda: dcp.load({"other": torch.ones(1)}, storage_reader=KitforgeReader(folder)))


def test_a_damaged_checkpoint_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    path = folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        KitforgeReader(folder)


def test_a_folder_of_ours_is_told_from_others(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    assert [KitforgeReader.validate_checkpoint_id(place) for place in (folder, tmp_path)] == [True, False]
