"""Mixtral's folders in both layouts of expert tensors, whole and damaged, and what has no folder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import HuggingFaceFolder
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region
from kitforge.models import loading
from kitforge.models.mixtral.model import MixtralConfig
from tests.models.conftest import GetPeer

CPU = torch.device("cpu")
ONE = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
STACKED = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def stacked(peer: GetPeer, tmp_path: Path) -> Path:
    peer("mixtral").model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert STACKED in load_file(tmp_path / "stacked" / "model.safetensors")
    return tmp_path / "stacked"


def test_a_folder_of_stacked_experts_is_that_of_single_ones(stacked: Path, peer: GetPeer, tmp_path: Path) -> None:
    one, other = (loading.load(folder, device=CPU) for folder in (peer("mixtral").folder, stacked))
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    loading.save(other, tmp_path / "written")
    wanted = load_file(peer("mixtral").folder / "model.safetensors")
    written = load_file(tmp_path / "written" / "model.safetensors")
    assert written.keys() == wanted.keys()
    assert all(torch.equal(written[name], each) for name, each in wanted.items())


def test_only_the_experts_of_a_region_are_read(peer: GetPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = HuggingFaceFolder.tensor
    monkeypatch.setattr(HuggingFaceFolder, "tensor", lambda self, name: (read.append(name), original(self, name))[1])
    stored, name = loading.open_model(peer("mixtral").folder), "blocks.1.mlp.experts.down"
    whole = stored.read(name, None)
    for first, count, rows in ((1, 2, (3, 7)), (0, 1, (0, 64)), (4, 0, (0, 64))):
        read.clear()
        region = Region(
            global_shape=tuple(whole.shape), offset=(first, rows[0], 0), shape=(count, rows[1], whole.shape[2])
        )
        assert torch.equal(stored.read(name, region), region.of(whole))
        # Of none the last one, for its dtype.
        wanted = range(first, first + count) if count else [3]
        assert read == [f"model.layers.1.block_sparse_moe.experts.{each}.w2.weight" for each in wanted]


def _without(held: dict[str, Tensor]) -> None:
    del held[ONE]


def _one_too_many(held: dict[str, Tensor]) -> None:
    held[ONE.replace("experts.2", "experts.4")] = held[ONE].clone()


def _in_both_layouts(held: dict[str, Tensor]) -> None:
    held[STACKED] = torch.zeros(4, 192, 64)


def _narrower(held: dict[str, Tensor]) -> None:
    held[ONE] = held[ONE][:-1].clone()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without, rf"got: +1 missing \({ONE}\)(.|\n)*do: "),
        (_one_too_many, r"got: +0 missing.*1 unexpected(.|\n)*experts\.4\.w3(.|\n)*expected:(.|\n)*do: "),
        (_in_both_layouts, rf"twice\n +got: +.*experts\.0\..* and {STACKED}(.|\n)*expected:(.|\n)*do: "),
        (_narrower, rf"got: +.*{ONE}: got \[95, 64\](.|\n)*do: "),
    ],
)
def test_a_folder_with_another_set_of_experts_is_refused(
    damage: Callable[[dict[str, Tensor]], None], message: str, peer: GetPeer, tmp_path: Path
) -> None:
    shutil.copytree(peer("mixtral").folder, tmp_path / "copy")
    held = load_file(tmp_path / "copy" / "model.safetensors")
    damage(held)
    save_file(held, tmp_path / "copy" / "model.safetensors")
    with pytest.raises(ModelError, match=message):
        loading.load(tmp_path / "copy", device=CPU)


def test_an_expert_in_two_shards_is_refused(peer: GetPeer, tmp_path: Path) -> None:
    shutil.copy(peer("mixtral").folder / "config.json", tmp_path)
    held = load_file(peer("mixtral").folder / "model.safetensors")
    first = {name: each for name, each in held.items() if ".0." in name}
    second = {name: each for name, each in held.items() if name not in first} | {ONE: held[ONE]}
    files = {"a.safetensors": first | {ONE: held[ONE]}, "b.safetensors": second}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    index = {"weight_map": {each: name for name, tensors in files.items() for each in tensors}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=f"two shards(.|\n)*{ONE}(.|\n)*expected: one"):
        loading.load(tmp_path, device=CPU)


@pytest.mark.parametrize(
    "options",
    [{"scoring": "sigmoid"}, {"num_shared": 1}, {"num_groups": 2}, {"balance": "bias"}, {"scale": 2.0}],
    ids=str,
)
def test_a_router_of_ours_alone_is_not_written(options: dict[str, Any], tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=11,
        dim=8,
        num_layers=1,
        num_heads=2,
        mlp_dim=6,
        experts=replace(ExpertsConfig(num_experts=4, top_k=2), **options),
    )
    with pytest.raises(ModelError, match=rf"got: +{next(iter(options))}="):
        loading.save(Decoder(config), tmp_path / "never")
    assert not (tmp_path / "never").exists()
