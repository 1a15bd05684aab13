"""What we write, `transformers` reads, and computes the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from safetensors.torch import load_file

from kitforge.core.checkpoint.hugging_face import write_folder
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import LoraConfig, attach
from kitforge.foundation.errors import ModelError
from kitforge.kits.language_model import save_language_model
from kitforge.kits.network_source import copy_model
from kitforge.models import loading as model_folder
from kitforge.models.catalog import converter_of
from kitforge.models.llama import convert as llama
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.weight_mapping import export_tensors
from tests.models.conftest import GetPeer
from tests.models.variants import (
    VARIANTS,
    build_peer,
    converter_and_config,
    largest_difference,
    logits_of,
    ours_from,
    tokens,
)

TINY = LlamaConfig(vocab_size=97, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, mlp_dim=96, max_length=64)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_written_config_is_read_back(name: str, peer: GetPeer) -> None:
    converter, config = converter_and_config(peer(name))
    ours = converter.read_config(config)
    assert converter.read_config(converter.write_config(ours)).decoder() == ours.decoder()


def test_half_precision_weights_stay_half(peer: GetPeer, tmp_path: Path) -> None:
    assert reloaded(ours_from(peer("llama").folder).bfloat16(), tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options",
    [
        {"qkv_bias": True, "mlp_bias": True},
        {"out_bias": True},
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
        # A SmolLM3 whose layers all rotate.
        {"sliding_window": 8, "mlp_bias": True},
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


# Gemma multiplies by one plus the weight of a norm; together both fit in no half-precision number.
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def half_gemma(folder: Path, dtype: torch.dtype) -> Any:
    """Theirs, saved in half precision, with norms that are tiny, small and large."""
    model = build_peer(VARIANTS["gemma3"]).to(dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, each in model.named_parameters():
            if name.endswith("norm.weight"):
                each.copy_(torch.randn(each.shape, generator=generator) * 10.0 ** torch.randint(-6, 1, each.shape))
    model.save_pretrained(folder)
    return model


def held(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@HALVES
def test_an_export_of_untouched_norms_of_gemma_has_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    half_gemma(tmp_path / "theirs", dtype)
    model_folder.export(model_folder.open_model(tmp_path / "theirs"), tmp_path / "ours")
    theirs, ours = held(tmp_path / "theirs"), held(tmp_path / "ours")
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []


@pytest.mark.parametrize("door", ["memory", "copy", "adapter"])
def test_gemma_in_half_precision_is_written_as_it_was_computed(door: str, tmp_path: Path) -> None:
    half_gemma(tmp_path / "theirs", torch.bfloat16)
    ours = model_folder.load(tmp_path / "theirs", device=torch.device("cpu"), dtype="bf16")
    computed = {name: each.detach().clone() for name, each in ours.named_parameters()}
    if door == "copy":
        ours = cast(Decoder, copy_model(ours, torch.device("cpu")))
    elif door == "adapter":
        attach(ours, "new", LoraConfig(rank=2))
    save_language_model(ours, tmp_path / "ours", None, "bfloat16")
    written = held(tmp_path / "ours")
    assert written["model.norm.weight"].dtype is torch.bfloat16
    for mapping in converter_of(ours.config).tensor_mappings(ours.config, "gemma3_text"):
        wanted = (computed[mapping.ours].double() - mapping.offset).bfloat16()
        assert torch.equal(written[mapping.theirs], wanted), mapping.theirs


@HALVES
def test_gemma_in_half_precision_is_computed_as_transformers_does(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = half_gemma(tmp_path, dtype)
    ours = model_folder.load(tmp_path, device=torch.device("cpu"), dtype="bf16" if dtype is torch.bfloat16 else "fp16")
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    for own, other in (
        (ours.norm, theirs.model.norm),
        (ours.blocks[0].mlp_norm, theirs.model.layers[0].pre_feedforward_layernorm),
    ):
        assert torch.equal(cast(Any, own)(hidden), other(hidden))
    exact = largest_difference(logits_of(theirs.float(), tokens()), logits_of(theirs.to(dtype), tokens()))
    assert largest_difference(logits_of(ours, tokens()), logits_of(theirs.float(), tokens())) < 1.5 * exact
