"""The other library's folders are read here, and ours there."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import read_folder, write_folder
from tests.core.checkpoint.example import assert_equal

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model: torch.nn.Module = transformers.LlamaForCausalLM(config)
    return model


def plain(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict(sorted(model.state_dict().items()))


@pytest.mark.parametrize("shard", ["10KB", "1GB"])
def test_their_folder_is_read(tmp_path: Path, theirs: torch.nn.Module, shard: str) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "10KB")
    folder = read_folder(tmp_path)
    assert folder.config["model_type"] == "llama"
    assert_equal({name: folder.tensor(name) for name in sorted(folder.names())}, plain(theirs))


@pytest.mark.parametrize("shard_bytes", [10_000, 10**9])
def test_our_folder_loads_there(tmp_path: Path, theirs: torch.nn.Module, shard_bytes: int) -> None:
    config = theirs.config.to_dict()
    generation = theirs.generation_config.to_dict()
    tensors = theirs.state_dict().items()
    write_folder(tmp_path, config, tensors, shard_bytes=shard_bytes, generation_config=generation)
    loaded, notes = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert_equal(plain(loaded), plain(theirs))
    assert not any(notes.values())
