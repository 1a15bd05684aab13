"""Opening: every damage is named, the step before is used, and nothing is loaded into the wrong place."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.load import load_tensors, newest, open_checkpoint
from kitforge.core.checkpoint.manifest import FileEntry, read_manifest, step_folder, steps, write_manifest
from kitforge.foundation.errors import CheckpointError, ModelError
from tests.core.checkpoint import example

FILES = ["manifest.json", "state.json", "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"]


def flip_first(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flip_middle(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def truncate(data: bytes) -> bytes:
    return data[:-2]


def empty(data: bytes) -> bytes:
    return data[:0]


def lengthen(data: bytes) -> bytes:
    return data + b"x"


@pytest.mark.parametrize("damage", [flip_first, flip_middle, flip_last, truncate, empty, lengthen])
@pytest.mark.parametrize("file", FILES)
def test_damage_of_any_file_is_named_and_the_step_before_is_used(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes]
) -> None:
    path = example.saved(tmp_path, 1, 2) / "step_2" / file
    path.write_bytes(damage(path.read_bytes()))
    told: list[CheckpointError] = []
    checkpoint = newest(tmp_path, on_damaged=told.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    example.assert_whole(checkpoint)
    assert len(told) == 1
    assert str(path) in str(told[0])


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = example.saved(tmp_path, 1) / "step_1" / file
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{file} is missing"):
        open_checkpoint(path.parent)


def test_a_flip_of_any_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    path = example.saved(tmp_path, 1) / "step_1" / "manifest.json"
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="manifest.json"):
            read_manifest(path.parent)


def test_a_truncated_file_tells_its_bytes(tmp_path: Path) -> None:
    path = example.saved(tmp_path, 1) / "step_1" / "state.json"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=f"truncated\n.*{size - 3} bytes\n.*{size} bytes"):
        open_checkpoint(path.parent)


def test_all_damaged_is_none_and_each_is_told(tmp_path: Path) -> None:
    example.saved(tmp_path, 1, 2)
    for step in (1, 2):
        (step_folder(tmp_path, step) / "state.json").unlink()
    told: list[CheckpointError] = []
    assert newest(tmp_path, on_damaged=told.append) is None
    assert ["step_2" in str(told[0]), "step_1" in str(told[1])] == [True, True]


def test_no_root_has_no_newest(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", on_damaged=pytest.fail) is None


def test_only_published_steps_count(tmp_path: Path) -> None:
    for name in ("step_10", "step_9", ".step_11.1.draft", "step_x", "step_012", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_12").touch()
    assert steps(tmp_path) == [9, 10]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        open_checkpoint(tmp_path / "absent")


def test_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    write_manifest(folder, dataclasses.replace(read_manifest(folder), format_version=4))
    with pytest.raises(CheckpointError, match="unknown format version\n  got:      4\n  expected: 3"):
        open_checkpoint(folder)


def test_a_manifest_with_an_unknown_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = example.saved(tmp_path, 1) / "step_1" / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "steps": 1}))
    monkeypatch.setattr("kitforge.core.checkpoint.manifest._signature", lambda _: values["sha256"])
    with pytest.raises(CheckpointError, match="not a manifest(.|\n)*unknown option 'steps'"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "absent.safetensors"])
def test_a_manifest_cannot_point_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    manifest = read_manifest(folder)
    elsewhere = dataclasses.replace(manifest.model[0], files=(name,))
    write_manifest(folder, dataclasses.replace(manifest, model=(elsewhere,)))
    with pytest.raises(CheckpointError, match="not a manifest|not its own"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "deeper/secret", ".."])
def test_a_file_outside_of_the_folder_is_refused_though_it_is_listed(tmp_path: Path, name: str) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    manifest = read_manifest(folder)
    listed = (*manifest.files, FileEntry(name=name, bytes=1, sha256="0"))
    for files in (listed, (listed[-1], *manifest.files)):
        write_manifest(folder, dataclasses.replace(manifest, files=files))
        with pytest.raises(CheckpointError, match="not its own"):
            read_manifest(folder)


def test_a_slice_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    manifest = read_manifest(folder)
    part = dataclasses.replace(manifest.model[0], shape=(128, 4))
    write_manifest(folder, dataclasses.replace(manifest, model=(part,)))
    with pytest.raises(CheckpointError, match="not what the manifest says"):
        open_checkpoint(folder).tensor(part.name)


def test_a_tensor_that_differs_from_its_entry_is_told(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    manifest = read_manifest(folder)
    other = dataclasses.replace(manifest.model[0], dtype="F64")
    write_manifest(folder, dataclasses.replace(manifest, model=(other,)))
    with pytest.raises(CheckpointError, match="not what the manifest says"):
        open_checkpoint(folder).tensor(other.name)


def test_an_unverified_damage_is_told_when_the_tensor_is_asked_for(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    path = folder / FILES[2]
    path.write_bytes(path.read_bytes()[:-8])
    checkpoint = open_checkpoint(folder, verify=False)
    with pytest.raises(CheckpointError, match=path.name):
        checkpoint.tensor("head.weight")


def test_names_and_single_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(example.saved(tmp_path, 3) / "step_3")
    assert checkpoint.names("model") == ["embedding.weight", "norm.bias", "head.weight"]
    assert checkpoint.names("optimizer") == ["embedding.weight.exp_avg", "embedding.weight.step"]
    assert checkpoint.tensor("embedding.weight.step").item() == 3
    with pytest.raises(CheckpointError, match="no tensor 'other'"):
        checkpoint.tensor("other")


def test_a_folder_may_be_copied_under_another_name(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 3) / "step_3"
    assert open_checkpoint(folder.rename(tmp_path / "best")).step == 3


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 3) / "step_3"
    open_checkpoint(folder).tensor("head.weight").zero_()
    example.assert_whole(open_checkpoint(folder))


def targets() -> dict[str, Tensor]:
    return {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros((), dtype=torch.int64)}


def test_tensors_are_copied_in_place() -> None:
    into = {"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.zeros(1, dtype=torch.bfloat16)}
    memory = into["a"].data_ptr()
    load_tensors(into, [("b", torch.ones(1)), ("a", torch.ones(2))], what="model")
    assert into["a"].tolist() == [1, 1]
    assert into["a"].data_ptr() == memory
    assert into["b"].item() == 1


def test_all_that_does_not_fit_is_listed_at_once() -> None:
    source = [("b", torch.zeros(1)), ("c", torch.tensor(1.0)), ("x", torch.zeros(1))]
    with pytest.raises(ModelError) as caught:
        load_tensors(targets(), source, what="model of step_3")
    message = str(caught.value)
    assert "model of step_3 does not fit" in message
    assert "1 missing (a)" in message
    assert "1 unexpected (x)" in message
    assert "2 misshapen (b: got [1], expected [4], c: got torch.float32, expected torch.int64)" in message


def test_long_lists_are_cut_and_counted() -> None:
    many = {f"layer{number}": torch.zeros(1) for number in range(12)}
    with pytest.raises(ModelError, match=r"12 missing \(layer0, .*layer9, \.\.\.\)"):
        load_tensors(many, [], what="model")


def test_a_tensor_that_comes_twice_is_unexpected() -> None:
    with pytest.raises(ModelError, match=r"1 unexpected \(a \(again\)\)"):
        load_tensors({"a": torch.zeros(1)}, [("a", torch.ones(1)), ("a", torch.ones(1))], what="model")


def test_a_target_without_memory_is_refused() -> None:
    with pytest.raises(ModelError, match="no memory yet"):
        load_tensors({"a": torch.zeros(1, device="meta")}, [("a", torch.ones(1))], what="model")


def test_only_weights_are_verified_where_only_weights_are_wanted(tmp_path: Path) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    damage(folder / FILES[3])
    example.assert_equal(dict(open_checkpoint(folder, parts=("model",)).model()), example.model(1))
    with pytest.raises(CheckpointError, match=FILES[3]):
        open_checkpoint(folder)
    damage(folder / FILES[2])
    with pytest.raises(CheckpointError, match=FILES[2]):
        open_checkpoint(folder, parts=("model",))


@pytest.mark.parametrize("name", FILES[1:3])
def test_what_weights_are_read_with_is_verified(tmp_path: Path, name: str) -> None:
    folder = example.saved(tmp_path, 1) / "step_1"
    damage(folder / name)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(folder, parts=("model",))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
