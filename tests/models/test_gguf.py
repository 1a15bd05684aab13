"""GGUF files: what is written is read back, by us, by the package gguf and by transformers; what cannot be is named."""

from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from kitforge.core.nn.decoder import Decoder
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region
from kitforge.models import loading
from kitforge.models.gguf import GgufWeights
from kitforge.models.llama.model import LlamaConfig
from tests.models.conftest import GetPeer
from tests.models.variants import ours_from

CPU = torch.device("cpu")


def exported(peer: GetPeer, name: str, folder: Path, dtype: ExportDtype = "float32") -> tuple[Decoder, Path]:
    """Our network of a peer's weights, and the file that it was written to."""
    model, path = ours_from(peer(name).folder), folder / f"{name}.gguf"
    loading.save(model, path, dtype=dtype)
    return model, path


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "q8_0"])
def test_weights_are_rounded_as_the_package_gguf_rounds_them(dtype: ExportDtype, peer: GetPeer, tmp_path: Path) -> None:
    model, path = exported(peer, "qwen2", tmp_path, dtype)
    again = loading.load(path, device=CPU)
    kind = {"float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}[dtype]
    number = getattr(gguf.GGMLQuantizationType, kind)
    for name, parameter in model.named_parameters():
        value = parameter.detach().numpy()
        rounded = value if value.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(value, number), number)
        assert np.array_equal(again.get_parameter(name).detach().numpy(), rounded), name


def test_rows_that_are_no_multiple_of_a_block_stay_in_half_precision(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=40, dim=32, num_layers=1, num_heads=2, mlp_dim=48)
    model = loading.build(config, device=CPU, seed=1)
    loading.save(model, tmp_path / "a.gguf", dtype="q8_0")
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(str(tmp_path / "a.gguf")).tensors}
    assert (kinds["blk.0.ffn_down.weight"], kinds["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")
    again = loading.load(tmp_path / "a.gguf", device=CPU)
    down = "blocks.0.mlp.down.weight"
    assert torch.equal(again.get_parameter(down), model.get_parameter(down).half().float())


def test_a_region_of_a_tensor_is_that_of_the_whole(peer: GetPeer, tmp_path: Path) -> None:
    model, path = exported(peer, "llama", tmp_path)
    stored = loading.open_model(path)
    name = "blocks.1.attention.query.weight"
    region = Region(global_shape=(64, 64), offset=(16, 0), shape=(16, 64))
    assert torch.equal(stored.read(name, region), model.get_parameter(name)[16:32])


def test_quantized_weights_are_half_precision_in_their_own_dtype(peer: GetPeer, tmp_path: Path) -> None:
    _, path = exported(peer, "llama", tmp_path, "q8_0")
    assert loading.open_model(path).dtype == torch.float16
    assert loading.open_model(path).config.dtype == "float16"


def written(path: Path, architecture: str = "llama", tensors: dict[str, Tensor] | None = None, **values: Any) -> Path:
    """A file with that metadata and those tensors."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"block_count": 1, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8}
    counts: dict[str, Any] = {**sizes, "attention.head_count": 2, "attention.head_count_kv": 2} | values
    for key, value in counts.items():
        if value is not None:
            add = writer.add_array if isinstance(value, list) else writer.add_uint32
            (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in ({"token_embd.weight": torch.zeros(4, 8)} | (tensors or {})).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)mamba.*llama, qwen2, qwen3"):
        loading.open_model(written(tmp_path / "a.gguf", "mamba"))


def test_missing_and_surplus_tensors_are_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", tensors={"blk.0.ffn_up_exps.weight": torch.zeros(8, 8)})
    with pytest.raises(ModelError, match=r"(?s)ffn_up_exps|input_layernorm"):
        loading.load(path, device=CPU)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"block_count": None}, "llama.block_count"),
        ({"attention.head_count_kv": [2, 1]}, "different shapes"),
        ({"rope.scaling.type": "longrope"}, "unknown way"),
    ],
)
def test_metadata_that_we_cannot_follow_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        GgufWeights(written(tmp_path / "a.gguf", **values))


def test_frequencies_that_are_not_llama3s_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.gguf", tensors={"rope_freqs.weight": torch.tensor([3.0, 1.0])})
    with pytest.raises(ModelError, match="LLaMA 3"):
        GgufWeights(path)


def test_the_order_of_rotated_features_is_turned_round(peer: GetPeer, tmp_path: Path) -> None:
    model, path = exported(peer, "llama_multi_query", tmp_path)
    file = {each.name: each.data for each in gguf.GGUFReader(str(path)).tensors}
    query = model.get_parameter("blocks.0.attention.query.weight").detach().numpy()
    # Feature i and i + 8 of a head of 16 are neighbours in the file.
    assert np.array_equal(file["blk.0.attn_q.weight"][:4], query[[0, 8, 1, 9]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", "got: +gpt2"),
        ("smollm3", "got: +smollm3"),
        ("gemma3", "got: +gemma3_text"),
        ("qwen3_biased_window", "got: +qwen3 with biases"),
        ("mistral", "sliding window"),
        ("yarn_mscale", "rope_scaling"),
        ("longrope_short", "rope_scaling"),
    ],
)
def test_a_network_that_llama_cpp_would_compute_otherwise_is_not_written(
    name: str, message: str, peer: GetPeer, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        exported(peer, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_blocks_of_gguf_are_for_gguf_files(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=40, dim=32, num_layers=1, num_heads=2, mlp_dim=32)
    with pytest.raises(ModelError, match="format=gguf"):
        loading.save(loading.build(config, device=CPU, seed=1), tmp_path / "folder", dtype="q8_0")


def test_a_reward_model_is_not_written(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=40, dim=32, num_layers=1, num_heads=2, mlp_dim=32)
    model = loading.build(config, device=CPU, seed=1)
    weights = dict(model.named_parameters())
    stored = loading.StoredModel(
        config=config,
        names=tuple(weights),
        read=lambda name, _region: cast(Tensor, weights[name].detach()),
        head={"score.weight": torch.ones(1, 32)},
    )
    with pytest.raises(ModelError, match="reward model"):
        loading.export(stored, tmp_path / "a.gguf")
