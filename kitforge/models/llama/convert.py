"""Conversion of LLaMA, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.weight_mapping import (
    ConfigFile,
    Converter,
    TensorMapping,
    decoder_mappings,
    read_shared_keys,
    require,
    write_shared_keys,
)


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Our options from config.json. Raises ModelError."""
    config = ConfigFile(config)
    require(config, {"hidden_act": "silu", "dual_chunk_attention_config": None}, "LLaMA")
    kind = config["model_type"]
    bias = config.flag("attention_bias", kind == "qwen2")
    return LlamaConfig(
        **read_shared_keys(config),
        num_kv_heads=config.optional_count("num_key_value_heads"),
        head_dim=config.optional_count("head_dim") or (128 if kind == "qwen3" else None),
        max_length=config.count("max_position_embeddings", 2048),
        norm_eps=config.number("rms_norm_eps", 1e-6, below=1.0),
        qkv_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=kind == "qwen3",
        **_window(config, kind),
    )


def _window(config: ConfigFile, kind: str) -> dict[str, Any]:
    """Mistral uses the window in all layers. Qwen's is off by default and starts at layer max_window_layers."""
    window = config.optional_count("sliding_window", 4096)
    if kind.startswith("qwen") and not config.flag("use_sliding_window", False):
        window = None
    if window is None or kind == "llama":
        return {}
    layers = config.count("num_hidden_layers", largest=MAX_LAYERS)
    types = config.get("layer_types") if kind != "mistral" else None
    config.check(
        types is None or (isinstance(types, list) and len(types) == layers), "layer_types", f"a list of {layers} kinds"
    )
    if types is None and kind != "mistral":
        first = config.number("max_window_layers", 28)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if types is None or all(each == "sliding_attention" for each in types):
        return {"sliding_window": window}
    return {
        "sliding_window": window,
        "window_layers": tuple(layer for layer, each in enumerate(types) if each == "sliding_attention"),
    }


def model_type(config: LlamaConfig) -> str:
    """The `model_type` of these options. Raises ModelError where no architecture has all of them."""
    if config.qk_norm:
        kind, plain = "qwen3", config.qkv_bias == config.out_bias and not config.mlp_bias
    elif config.qkv_bias and not config.out_bias:
        kind, plain = "qwen2", not config.mlp_bias
    elif config.sliding_window is not None:
        kind, plain = "mistral", not (config.out_bias or config.mlp_bias or config.window_layers is not None)
    else:
        kind, plain = "llama", config.qkv_bias == config.out_bias
    if not plain:
        message = "no Hugging Face architecture has this combination of options"
        raise ModelError(message, got=config, expected=f"the options of {kind}")
    return kind


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """The values of config.json."""
    kind = model_type(config)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    written = {"architectures": [f"{names[kind]}ForCausalLM"], "model_type": kind} | write_shared_keys(config)
    if kind == "mistral":
        return written | {"sliding_window": config.sliding_window}
    if kind.startswith("qwen"):
        return written | _qwen_window(config) | ({"attention_bias": config.qkv_bias} if kind == "qwen3" else {})
    return written | {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}


def _qwen_window(config: LlamaConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    windowed = layers if config.window_layers is None else config.window_layers
    sliding = set() if config.sliding_window is None else set(windowed)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": config.sliding_window,
        "max_window_layers": min(sliding, default=config.num_layers),
        "layer_types": ["sliding_attention" if layer in sliding else "full_attention" for layer in layers],
    }


def tensor_mappings(config: LlamaConfig, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    theirs = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output": "lm_head.weight",
    }
    return decoder_mappings(config, theirs, "model.layers", partial(_block, config))


def _block(config: LlamaConfig, ours: str, theirs: str) -> list[TensorMapping]:
    names = {
        "attention_norm.weight": "input_layernorm.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    }
    layers = {name: (f"self_attn.{name[0]}_proj", config.qkv_bias) for name in ("query", "key", "value")}
    layers["out"] = ("self_attn.o_proj", config.out_bias)
    linears = {f"attention.{name}": layer for name, layer in layers.items()}
    linears |= {f"mlp.{name}": (f"mlp.{name}_proj", config.mlp_bias) for name in ("gate", "up", "down")}
    for name, (source, has_bias) in linears.items():
        names |= {f"{name}.{kind}": f"{source}.{kind}" for kind in (("weight", "bias") if has_bias else ("weight",))}
    if config.qk_norm:
        names["attention.query_norm.weight"] = "self_attn.q_norm.weight"
        names["attention.key_norm.weight"] = "self_attn.k_norm.weight"
    return [TensorMapping(ours=ours + name, theirs=theirs + source) for name, source in names.items()]


CONVERTER = Converter(
    model_types=("llama", "mistral", "qwen2", "qwen3"),
    read_config=read_config,
    write_config=write_config,
    tensor_mappings=tensor_mappings,
    prefixes=("model.",),
    ignored_suffixes=("rotary_emb.inv_freq",),
)
