"""Hugging Face folders: theirs is read here, ours is read there, and what is damaged or pickled is named."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import read_folder, write_folder
from kitforge.foundation.errors import CheckpointError, ModelError
from tests.core.checkpoint.example import assert_equal

CONFIG = {"model_type": "llama", "hidden_size": 8}


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(True)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", CONFIG, weights().items(), shard_bytes=24)
    return tmp_path / "model"


def read(folder: Path) -> dict[str, Tensor]:
    opened = read_folder(folder)
    return {name: opened.tensor(name) for name in sorted(opened.names())}


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shards_come_back(folder: Path) -> None:
    assert_equal(read(folder), weights())
    assert read_folder(folder).config == CONFIG
    assert visible(folder) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_one_shard_needs_no_index(tmp_path: Path) -> None:
    write_folder(tmp_path, CONFIG, weights().items(), generation_config={"top_k": 5})
    assert_equal(read(tmp_path), weights())
    assert visible(tmp_path) == ["config.json", "generation_config.json", "model.safetensors"]


def test_views_and_parameters_are_written_as_they_look(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    write_folder(tmp_path, CONFIG, [("t", weight.T), ("w", weight)])
    assert_equal(read(tmp_path), {"t": weight.detach().T, "w": weight.detach()})


def test_a_new_model_replaces_the_old_one_and_nothing_else(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    write_folder(folder, {"new": True}, [("a", torch.zeros(1))])
    assert visible(folder) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_equal(read(folder), {"a": torch.zeros(1)})


def test_a_folder_can_be_rewritten_from_itself(folder: Path) -> None:
    opened = read_folder(folder)
    write_folder(folder, CONFIG, ((name, opened.tensor(name)) for name in opened.names()))
    assert_equal(read(folder), weights())


def test_a_full_disk_leaves_the_old_model(folder: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="could not be written"):
            write_folder(folder, {"new": True}, [("a", torch.zeros(100_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_equal(read(folder), weights())
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("step", range(8))
def test_an_interrupted_write_leaves_the_old_model_or_none_or_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    moves = iter(range(100))
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        if next(moves) == step:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    new = {name: tensor.float() + 1 for name, tensor in weights().items()}
    try:
        write_folder(folder, {"new": True}, new.items())
    except KeyboardInterrupt:
        monkeypatch.undo()
    try:
        is_new = read_folder(folder).config == {"new": True}
    except ModelError:
        return
    assert_equal(read(folder), new if is_new else weights())


def test_the_configuration_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        moved.append(target.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    write_folder(tmp_path, CONFIG, weights().items())
    assert moved[-2:] == ["model.safetensors", "config.json"]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_is_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=f"run any code(.|\n)*{name}(.|\n)*save_pretrained"):
        read_folder(tmp_path)


def test_a_folder_without_weights_tells_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"holds no weights\n  got:      config\.json"):
        read_folder(tmp_path)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no model folder"):
        read_folder(tmp_path / "absent")


def test_a_missing_configuration_is_told(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="has no config.json"):
        read_folder(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_broken_configuration_is_told(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match="config.json is damaged"):
        read_folder(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors is missing"):
        read_folder(folder)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_truncated_shard_is_named(folder: Path, keep: int) -> None:
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="model-00002-of-00002.safetensors cannot be read"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "no weight_map"),
        ({"weight_map": {"a": "../other.safetensors"}}, "outside of its folder"),
        ({"weight_map": {"z": "model-00001-of-00002.safetensors"}}, "lacks the tensor 'z'"),
    ],
)
def test_an_index_that_lies_is_told(folder: Path, index: dict[str, object], message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        read_folder(folder)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    first, second = sorted(folder.glob("*-of-*"))
    index = {"weight_map": {"a": first.name, "b": second.name}}
    write_folder(folder / "both", CONFIG, [("a", torch.ones(1)), ("b", torch.ones(1))])
    for path in (first, second):
        path.write_bytes((folder / "both" / "model.safetensors").read_bytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="two shards"):
        read_folder(folder)


def test_a_name_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="two tensors"):
        write_folder(tmp_path, CONFIG, [("a", torch.ones(2)), ("a", torch.ones(2))], shard_bytes=4)


def test_an_unknown_tensor_is_told(folder: Path) -> None:
    with pytest.raises(ModelError, match="no tensor 'z'"):
        read_folder(folder).tensor("z")
