"""Every variant of the families that `transformers` has too, as tiny random networks, and ours of the same weights.

B batch, T length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kitforge.core.checkpoint.hugging_face import read_folder
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.models.catalog import converter_of_type
from kitforge.models.weight_mapping import Converter, import_tensors

VOCAB, LENGTH, PAIRS = 97, 24, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A class of `transformers` and the options that make it tiny and special."""

    architecture: str  # the class is <architecture>ForCausalLM or LMHeadModel
    options: Mapping[str, Any]
    config: str = ""  # the class of its options, where it is not <architecture>Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A random network of theirs and the folder that it was saved to."""

    name: str
    model: Any
    folder: Path


def _gpt2(**options: Any) -> Variant:
    sizes = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    return Variant(architecture="GPT2", options=sizes | {"bos_token_id": 0, "eos_token_id": 0} | options)


def _bloom(**options: Any) -> Variant:
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 2, "n_head": 4}
    return Variant(architecture="Bloom", options=sizes | {"pad_token_id": None} | options)


def _modern(architecture: str, config: str = "", **options: Any) -> Variant:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64}
    # A padding token would have the peer leave its row of the embedding without a gradient.
    tokens = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
    return Variant(architecture=architecture, options=sizes | tokens | options, config=config)


def _rope(kind: str, max_length: int = 64, **options: Any) -> Variant:
    rope = {"rope_type": kind, "rope_theta": 1000.0} | options
    return _modern("Llama", max_position_embeddings=max_length, rope_parameters=rope)


_LONG = {
    "short_factor": [1 + 0.1 * pair for pair in range(PAIRS)],
    "long_factor": [2 + 0.5 * pair for pair in range(PAIRS)],
    "factor": 3.0,
}

VARIANTS: dict[str, Variant] = {
    "bloom": _bloom(),
    "bloom_six_heads": _bloom(n_head=6, layer_norm_epsilon=1e-4),
    "bloom_untied": _bloom(tie_word_embeddings=False),
    "gpt2": _gpt2(),
    "gpt2_inner": _gpt2(n_inner=100),
    "gpt2_inverse_layer": _gpt2(scale_attn_by_inverse_layer_idx=True),
    "gpt2_untied": _gpt2(tie_word_embeddings=False),
    "llama": _modern("Llama"),
    "llama_multi_query": _modern("Llama", num_key_value_heads=1),
    "llama_multi_head": _modern("Llama", num_key_value_heads=4),
    "llama_tied": _modern("Llama", tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama_biased": _modern("Llama", attention_bias=True, mlp_bias=True),
    "llama_head_dim": _modern("Llama", head_dim=24),
    "linear": _rope("linear", factor=3.0),
    "dynamic_within": _rope("dynamic", factor=3.0),
    "dynamic_beyond": _rope("dynamic", 16, factor=3.0),
    "yarn": _rope("yarn", factor=3.0, original_max_position_embeddings=16),
    "yarn_mscale": _rope("yarn", factor=3.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.4),
    "yarn_ramp": _rope(
        "yarn", factor=3.0, original_max_position_embeddings=32, truncate=False, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn_attention": _rope("yarn", factor=3.0, original_max_position_embeddings=16, attention_factor=0.8),
    "llama3": _rope(
        "llama3", factor=6.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "longrope_short": _rope("longrope", original_max_position_embeddings=32, **_LONG),
    "longrope_long": _rope("longrope", original_max_position_embeddings=16, **_LONG),
    "longrope_attention": _rope("longrope", original_max_position_embeddings=16, attention_factor=1.3, **_LONG),
    "mistral": _modern("Mistral", sliding_window=8),
    "mistral_without_window": _modern("Mistral", sliding_window=None),
    "mixtral": _modern("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "mixtral_window": _modern(
        "Mixtral", num_local_experts=5, num_experts_per_tok=3, sliding_window=8, head_dim=24, tie_word_embeddings=True
    ),
    "qwen2": _modern("Qwen2"),
    "qwen2_window": _modern("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen2_window_first": _modern(
        "Qwen2",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3": _modern("Qwen3", head_dim=32),
    "qwen3_biased_window": _modern(
        "Qwen3", head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=0
    ),
    "qwen3_moe": _modern(
        "Qwen3Moe",
        num_hidden_layers=3,
        head_dim=24,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_gguf": _modern(
        "Qwen3Moe", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True
    ),
    "qwen3_moe_sparse_step": _modern(
        "Qwen3Moe",
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=40,
        decoder_sparse_step=2,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=6,
        tie_word_embeddings=True,
    ),
    "smollm3": _modern("SmolLM3", num_hidden_layers=5, tie_word_embeddings=False),
    "smollm3_window": _modern(
        "SmolLM3", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=6, attention_bias=True
    ),
    "gemma3": _modern("Gemma3", config="Gemma3TextConfig", num_hidden_layers=3, head_dim=24, sliding_window=6),
    "gemma3_scaled": _modern(
        "Gemma3",
        config="Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=20,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "glm": _modern("Glm", head_dim=16),
    "glm_plain": _modern(
        "Glm",
        head_dim=32,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    ),
    "glm4": _modern("Glm4", head_dim=16),
    "glm4_unbiased": _modern("Glm4", head_dim=16, attention_bias=False),
}


def build_peer(variant: Variant) -> Any:
    """A network of theirs with every parameter, biases and norms too, moved off its initial value."""
    config = getattr(transformers, variant.config or f"{variant.architecture}Config")(**variant.options)
    head = "LMHeadModel" if variant.architecture == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, variant.architecture + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def ours_from(folder: Path, level: CompileLevel = "O0") -> Decoder:
    """Our network of the weights in a folder."""
    source = read_folder(folder)
    converter = converter_of_type(source.config["model_type"])
    config = converter.read_config(source.config)
    pieces = converter.tensor_mappings(config, source.config["model_type"])
    return filled(config, read_all(import_tensors(converter, pieces, source.names(), source.tensor)), level)


def read_all(readers: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
    """All tensors by name."""
    return {name: read() for name, read in readers.items()}


def filled(config: FamilyConfig, tensors: Mapping[str, Tensor], level: CompileLevel = "O0") -> Decoder:
    """Our network of these tensors, which must be exactly its parameters."""
    model = Decoder(config, select(level))
    missing, unexpected = model.load_state_dict(tensors, strict=True)
    assert not missing and not unexpected
    return model.eval()


def converter_and_config(peer: Peer) -> tuple[Converter, dict[str, Any]]:
    """Our converter of a peer, and its folder's config.json."""
    config = read_folder(peer.folder).config
    return converter_of_type(config["model_type"]), config


def tokens() -> Tensor:
    """[B, T] random token ids."""
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(7))


def logits_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [B, T, vocab] of a network of theirs or ours."""
    with torch.no_grad():
        output: Any = model(ids)
    return output if isinstance(output, Tensor) else output.logits


def largest_difference(one: Tensor, other: Tensor) -> float:
    """The largest absolute difference of two tensors."""
    return (one - other).abs().max().item()
