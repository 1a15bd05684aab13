"""Conversion of Mixtral, whose folders hold the matrices of each expert, or those of all experts of a block."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.models.mixtral.model import MixtralConfig
from kitforge.models.weight_mapping import (
    LLAMA_NAMES,
    SHARED_KEYS,
    Converter,
    TensorMapping,
    attention_mappings,
    checked,
    decoder_mappings,
    expert_mappings,
    read_experts,
    read_rope,
    read_shared_keys,
    stacked_expert_mappings,
    write_experts,
    write_shared_keys,
)

_KEYS = SHARED_KEYS.with_keys(
    "num_local_experts num_experts_per_tok router_aux_loss_coef sliding_window",
    refusal="a Mixtral of another architecture",
    accepted={"attention_bias": False, "router_jitter_noise": (0, 0.0, None), "mlp_bias": False},
)


def read_config(values: Mapping[str, Any]) -> MixtralConfig:
    """Our options from config.json. Raises ModelError."""
    config = checked(values, _KEYS)
    rope = read_rope(config)
    config.check(rope.get("fraction", 1.0) == 1.0, "partial_rotary_factor", "1.0, the whole head")
    return MixtralConfig(
        **(read_shared_keys(config) | {"rope_theta": rope.get("theta", 1e6)}),
        experts=read_experts(config, "num_local_experts", default=(8, 2)),
        num_kv_heads=config.optional_count("num_key_value_heads", 8),
        head_dim=config.optional_count("head_dim"),
        max_length=config.count("max_position_embeddings", 131072),
        norm_eps=config.number("rms_norm_eps", 1e-5, below=1.0),
        sliding_window=config.optional_count("sliding_window"),
    )


def write_config(config: MixtralConfig) -> dict[str, Any]:
    """The values of config.json. Raises ModelError where no architecture has all of these options."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": config.sliding_window,
        **write_shared_keys(config),
        **write_experts(config.experts, "num_local_experts"),
    }


def tensor_mappings(config: MixtralConfig, _: str = "mixtral") -> list[TensorMapping]:
    """Our tensors and theirs, as published: each expert has tensors of its own."""
    return decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_block, config))


def stacked_mappings(config: MixtralConfig, _: str = "mixtral") -> list[TensorMapping]:
    """The same where all experts of a block lie in one tensor."""
    return decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_stacked_block, config))


def _block(config: MixtralConfig, ours: str, theirs: str) -> list[TensorMapping]:
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    experts = expert_mappings(
        f"{ours}mlp.experts.", f"{theirs}block_sparse_moe.experts.", config.experts.num_experts, names
    )
    router = TensorMapping(ours=f"{ours}mlp.router.weight", theirs=f"{theirs}block_sparse_moe.gate.weight")
    return [*attention_mappings(ours, theirs), router, *experts]


def _stacked_block(config: MixtralConfig, ours: str, theirs: str) -> list[TensorMapping]:
    experts = stacked_expert_mappings(f"{ours}mlp.experts.", f"{theirs}mlp.experts.", config.mlp_dim)
    router = TensorMapping(ours=f"{ours}mlp.router.weight", theirs=f"{theirs}mlp.gate.weight")
    return [*attention_mappings(ours, theirs), router, *experts]


CONVERTER = Converter(
    ("mixtral",),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("model.",),
    ignored_suffixes=("rotary_emb.inv_freq",),
    stacked_mappings=stacked_mappings,
)
