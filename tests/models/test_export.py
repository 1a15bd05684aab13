"""What we write, `transformers` reads, and computes the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kitforge.core.checkpoint.hugging_face import write_folder
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.foundation.errors import ModelError
from kitforge.models.catalog import converter_of
from kitforge.models.llama import convert as llama
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.weight_mapping import export_tensors
from tests.models.conftest import GetPeer
from tests.models.variants import VARIANTS, converter_and_config, largest_difference, logits_of, ours_from, tokens

TINY = LlamaConfig(vocab_size=97, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=96, max_length=64)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_export_reloads_to_the_same_logits(name: str, peer: GetPeer, tmp_path: Path) -> None:
    ours = ours_from(peer(name).folder)
    assert largest_difference(logits_of(reloaded(ours, tmp_path), tokens()), logits_of(ours, tokens())) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_a_written_config_is_read_back(name: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    ours = converter.read_config(config)
    assert converter.read_config(converter.write_config(ours)).decoder() == ours.decoder()


@pytest.mark.parametrize("name", ["gpt2", "llama", "glm", "bloom"])
def test_tensors_come_back_unchanged_bit_for_bit(name: str, peer: GetPeer) -> None:
    source = dict(peer(name).model.state_dict())
    ours = ours_from(peer(name).folder)
    converter, config = converter_and_config(peer(name))
    written = dict(
        export_tensors(converter.tensor_mappings(ours.config, config["model_type"]), ours.state_dict().__getitem__)
    )
    assert written.keys() == source.keys() - ({"lm_head.weight"} if ours.output is None else set())
    assert all(torch.equal(tensor, source[key]) for key, tensor in written.items())
    assert all(tensor.is_contiguous() for tensor in written.values())


def test_a_swapped_tensor_would_show(peer: GetPeer, tmp_path: Path) -> None:
    ours = ours_from(peer("llama").folder)
    expected = logits_of(ours, tokens())
    attention: Any = ours.blocks[0]
    attention.attention.key, attention.attention.value = attention.attention.value, attention.attention.key
    assert largest_difference(logits_of(reloaded(ours, tmp_path), tokens()), expected) > 1e-2


def test_half_precision_weights_stay_half(peer: GetPeer, tmp_path: Path) -> None:
    assert reloaded(ours_from(peer("llama").folder).bfloat16(), tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "mlp_bias": True},
        {"out_bias": True},
        {"sliding_window": 8, "mlp_bias": True},
        {"sliding_window": 8, "out_bias": True},
        {"qk_norm": True, "qkv_bias": True},
        {"qk_norm": True, "mlp_bias": True},
    ],
)
def test_a_mix_that_no_architecture_has_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="no Hugging Face architecture"):
        llama.CONVERTER.write_config(replace(TINY, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 8},
        {"qkv_bias": True, "sliding_window": 8, "window_layers": (0,)},
        {"qkv_bias": True, "head_dim": 24},
        {"qk_norm": True, "sliding_window": 8},
        {"qkv_bias": True, "out_bias": True},
    ],
)
def test_a_network_of_our_own_is_written_too(options: dict[str, Any], tmp_path: Path) -> None:
    ours = Decoder(replace(TINY, **options)).eval()
    init_weights(ours.named_parameters(), 2, seed=3)
    assert largest_difference(logits_of(reloaded(ours, tmp_path), tokens()), logits_of(ours, tokens())) < 1e-5


def reloaded(ours: Decoder, folder: Path) -> Any:
    """What `transformers` makes of our export; no tensor may be missing or left over."""
    config: Any = ours.config
    converter = converter_of(config)
    written = converter.write_config(config)
    write_folder(
        folder,
        written,
        export_tensors(converter.tensor_mappings(config, written["model_type"]), ours.state_dict().__getitem__),
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    return model.eval()
