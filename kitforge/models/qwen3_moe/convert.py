"""Conversion of Qwen3 MoE."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.models.qwen3_moe.model import Qwen3MoEConfig
from kitforge.models.weight_mapping import (
    LLAMA_NAMES,
    SHARED_KEYS,
    ConfigFile,
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

_MATRICES = {name: f"{name}_proj" for name in ("gate", "up", "down")}
_KEYS = SHARED_KEYS.with_keys(
    """decoder_sparse_step mlp_only_layers moe_intermediate_size norm_topk_prob num_experts num_experts_per_tok
    num_local_experts router_aux_loss_coef sliding_window use_sliding_window""",
    refusal="a Qwen3 MoE of another architecture",
    unused="max_window_layers",
)


def read_config(values: Mapping[str, Any]) -> Qwen3MoEConfig:
    """Our options from config.json. Raises ModelError."""
    config = checked(values, _KEYS, {"num_local_experts": "num_experts"})
    config.check(read_rope(config).get("fraction", 1.0) == 1.0, "partial_rotary_factor", "1.0, the whole head")
    normalize, window = config.flag("norm_topk_prob", False), config.optional_count("sliding_window", 4096)
    return Qwen3MoEConfig(
        **read_shared_keys(config),
        expert_dim=config.count("moe_intermediate_size", 768),
        experts=read_experts(config, "num_experts", default=(128, 8), normalize=normalize),
        dense_layers=_dense_layers(config),
        num_kv_heads=config.optional_count("num_key_value_heads", 4),
        head_dim=config.optional_count("head_dim"),
        max_length=config.count("max_position_embeddings", 32768),
        norm_eps=config.number("rms_norm_eps", 1e-6, below=1.0),
        attention_bias=config.flag("attention_bias", False),
        sliding_window=window if config.flag("use_sliding_window", False) else None,
    )


def _dense_layers(config: ConfigFile) -> tuple[int, ...]:
    """The layers without experts: those of `mlp_only_layers`, and of each `decoder_sparse_step` all but the last."""
    layers, step = range(config.count("num_hidden_layers")), config.count("decoder_sparse_step", 1)
    listed = config.given("mlp_only_layers", [])
    are_layers = isinstance(listed, list) and all(type(each) is int and each in layers for each in listed)
    config.check(are_layers, "mlp_only_layers", f"a list of layers from 0 to {len(layers) - 1}")
    return tuple(layer for layer in layers if layer in listed or (layer + 1) % step)


def write_config(config: Qwen3MoEConfig) -> dict[str, Any]:
    """The values of config.json. Raises ModelError where no architecture has all of these options."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": config.expert_dim,
        "norm_topk_prob": config.experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(config.dense_layers),
        "attention_bias": config.attention_bias,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        **write_shared_keys(config),
        **write_experts(config.experts, "num_experts"),
    }


def tensor_mappings(config: Qwen3MoEConfig, _: str = "qwen3_moe") -> list[TensorMapping]:
    """Our tensors and theirs, as published: each expert has tensors of its own."""
    return decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_block, config, False))


def stacked_mappings(config: Qwen3MoEConfig, _: str = "qwen3_moe") -> list[TensorMapping]:
    """The same where all experts of a block lie in one tensor."""
    return decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_block, config, True))


def _block(config: Qwen3MoEConfig, is_stacked: bool, ours: str, theirs: str) -> list[TensorMapping]:
    attention = attention_mappings(ours, theirs, bias=config.attention_bias, qk_norm=True)
    if int(ours.split(".")[1]) in config.dense_layers:
        names = {f"{ours}mlp.{own}.weight": f"{theirs}mlp.{name}.weight" for own, name in _MATRICES.items()}
        return attention + [TensorMapping(ours=own, theirs=name) for own, name in names.items()]
    router = TensorMapping(ours=f"{ours}mlp.router.weight", theirs=f"{theirs}mlp.gate.weight")
    ends = f"{ours}mlp.experts.", f"{theirs}mlp.experts."
    if is_stacked:
        return [*attention, router, *stacked_expert_mappings(*ends, config.expert_dim)]
    return [*attention, router, *expert_mappings(*ends, config.experts.num_experts, _MATRICES)]


CONVERTER = Converter(
    ("qwen3_moe",),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("model.",),
    ignored_suffixes=("rotary_emb.inv_freq",),
    stacked_mappings=stacked_mappings,
)
