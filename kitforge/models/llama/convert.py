"""Conversion of LLaMA, Mistral, Qwen2, Qwen3, SmolLM3 and Gemma 3 (the text models)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.weight_mapping import (
    LLAMA_NAMES,
    LLAMA_NORMS,
    SHARED_KEYS,
    ConfigFile,
    Converter,
    TensorMapping,
    checked,
    decoder_mappings,
    read_rope,
    read_shared_keys,
    write_rope,
    write_shared_keys,
)


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Our options from config.json. Raises ModelError."""
    kind = config["model_type"]
    defaults = _DEFAULTS.get(kind, {})
    config = checked(
        defaults | {name: each for name, each in config.items() if each is not None or name not in defaults},
        _KEYS.get(kind, _WINDOW_KEYS),
    )
    own = _read_gemma3(config) if kind == "gemma3_text" else {}
    config.check(read_rope(config).get("fraction", 1.0) == 1.0, "partial_rotary_factor", "1.0, the whole head")
    bias = config.flag("attention_bias", kind == "qwen2")
    return LlamaConfig(
        **read_shared_keys(config),
        **own,
        num_kv_heads=config.optional_count("num_key_value_heads", _KV_HEADS.get(kind)),
        head_dim=config.optional_count("head_dim"),
        max_length=config.count("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6, below=1.0),
        qkv_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=config.flag("mlp_bias", False),
        qk_norm=kind in ("qwen3", "gemma3_text"),
        **_window(config, kind),
        no_rope_layers=_no_rope_layers(config) if kind == "smollm3" else (),
    )


_WINDOWS = "layer_types max_window_layers sliding_window use_sliding_window"
_WINDOW_KEYS = SHARED_KEYS.with_keys(refusal="a LLaMA of another architecture", obeyed=f"mlp_bias {_WINDOWS}")
_KEYS = {
    # LLaMA computes no windows, whatever its file says.
    "llama": SHARED_KEYS.with_keys(refusal="a LLaMA of another architecture", obeyed="mlp_bias", unused=_WINDOWS),
    "smollm3": _WINDOW_KEYS.with_keys("no_rope_layers no_rope_layer_interval"),
    "gemma3_text": _WINDOW_KEYS.with_keys(
        refusal="a Gemma 3 of another architecture",
        obeyed="query_pre_attn_scalar rope_local_base_freq sliding_window_pattern",
        accepted={
            "hidden_activation": "gelu_pytorch_tanh",
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
}
# What an architecture means by a key that its file lacks or has as null.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"max_position_embeddings": 131072},
    "qwen2": {"max_position_embeddings": 32768},
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32768},
    "smollm3": {"rope_theta": 2e6, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "gemma3_text": {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "sliding_window": 4096,
    },
}
# Of keys alone that its file lacks: null means as many as there are heads.
_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32, "smollm3": 4}
_GEMMA3 = {"mlp_kind": "geglu", "sandwich_norms": True, "scale_embedding": True}


def _read_gemma3(config: ConfigFile) -> dict[str, Any]:
    """The options that Gemma 3 alone has. Leaves the keys of the layers without a window where LLaMA has them."""
    local = ConfigFile(config)
    rope = config.group("rope_parameters")
    if "full_attention" in rope:
        config["rope_parameters"] = rope["full_attention"] | (config.pop("rope_scaling", None) or {})
        local = ConfigFile(rope.get("sliding_attention") or {})
        if local.get("rope_type", "default") != "default":
            message = "config.json: a Gemma 3 of another architecture"
            expected = "rope_type=default for sliding_attention in rope_parameters"
            raise ModelError(message, got=f"rope_type={local['rope_type']}", expected=expected)
        local["rope_local_base_freq"] = local.get("rope_theta")
    return _GEMMA3 | {
        "local_rope_theta": local.number("rope_local_base_freq", 10000.0, least=1.0, below=1e12),
        "query_pre_attn_scalar": config.count("query_pre_attn_scalar"),
    }


def _no_rope_layers(config: ConfigFile) -> tuple[int, ...]:
    """The layers of a SmolLM3 without rotary positions."""
    count = config.count("num_hidden_layers", largest=MAX_LAYERS)
    interval = config.count("no_rope_layer_interval", 4)
    rotates = config.given("no_rope_layers", [(layer + 1) % interval for layer in range(count)])
    fits = isinstance(rotates, list) and len(rotates) >= count
    config.check(fits, "no_rope_layers", f"a list of {count} numbers, 0 for a layer without rotary positions")
    return tuple(layer for layer in range(count) if not rotates[layer])


_TYPES = ("full_attention", "sliding_attention")


def _window(config: ConfigFile, kind: str) -> dict[str, Any]:
    """`layer_types` says which layers use the window. Without it Mistral's is in all layers; Qwen's is off by default
    and starts at layer max_window_layers; Gemma's is in all layers but every sixth."""
    window = config.optional_count("sliding_window", 4096)
    if kind not in ("mistral", "gemma3_text") and not config.flag("use_sliding_window", False):
        window = None
    if window is None or kind == "llama":
        return {}
    layers = config.count("num_hidden_layers", largest=MAX_LAYERS)
    types = config.get("layer_types")
    config.check(
        types is None or (isinstance(types, list) and len(types) == layers and all(each in _TYPES for each in types)),
        "layer_types",
        f"a list of {layers}, each of {' or '.join(_TYPES)}",
    )
    if types is None and kind == "gemma3_text":
        every = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
        types = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]
    if types is None and kind == "smollm3":
        without = _no_rope_layers(config)
        types = ["sliding_attention" if layer in without else "full_attention" for layer in range(layers)]
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
    gemma3 = config.qk_norm and all(getattr(config, name) == value for name, value in _GEMMA3.items())
    if gemma3:
        kind, plain = "gemma3_text", config.qkv_bias == config.out_bias and not config.mlp_bias
    elif config.no_rope_layers:
        kind, plain = "smollm3", config.qkv_bias == config.out_bias and not config.qk_norm
    elif config.qk_norm:
        kind, plain = "qwen3", config.qkv_bias == config.out_bias and not config.mlp_bias
    elif config.qkv_bias and not config.out_bias:
        kind, plain = "qwen2", not config.mlp_bias
    elif config.sliding_window is not None and (config.out_bias or config.mlp_bias):
        kind, plain = "smollm3", config.qkv_bias == config.out_bias
    elif config.sliding_window is not None:
        kind, plain = "mistral", True
    else:
        kind, plain = "llama", config.qkv_bias == config.out_bias
    needs_gemma3 = config.local_rope_theta is not None or config.query_pre_attn_scalar is not None
    needs_gemma3 |= config.mlp_kind != "swiglu" or config.sandwich_norms or config.scale_embedding
    if not plain or (needs_gemma3 and not gemma3) or (config.no_rope_layers and kind != "smollm3"):
        message = "no Hugging Face architecture has this combination of options"
        raise ModelError(message, got=config, expected=f"the options of {kind}")
    return kind


def write_config(config: LlamaConfig) -> dict[str, Any]:
    """The values of config.json."""
    kind = model_type(config)
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
    names["gemma3_text"] = "Gemma3"
    written = {"architectures": [f"{names[kind]}ForCausalLM"], "model_type": kind} | write_shared_keys(config)
    if kind == "mistral":
        windows = {} if config.window_layers is None else {"layer_types": _layer_types(config)["layer_types"]}
        return written | {"sliding_window": config.sliding_window} | windows
    if kind.startswith("qwen"):
        return written | _layer_types(config) | ({"attention_bias": config.qkv_bias} if kind == "qwen3" else {})
    written |= {"attention_bias": config.qkv_bias}
    if kind == "gemma3_text":
        return written | _write_gemma3(config, written["rope_parameters"])
    written |= {"mlp_bias": config.mlp_bias}
    if kind == "smollm3":
        rotates = [int(layer not in config.no_rope_layers) for layer in range(config.num_layers)]
        # The default padding token is none of a small vocabulary.
        return written | _layer_types(config) | {"no_rope_layers": rotates, "pad_token_id": None}
    return written


def _write_gemma3(config: LlamaConfig, rope: dict[str, Any]) -> dict[str, Any]:
    types = _layer_types(config)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_width,
        "sliding_window": types["sliding_window"],
        "layer_types": types["layer_types"],
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": write_rope(config.local_rope_theta or config.rope_theta, None, None),
        },
    }


def _layer_types(config: LlamaConfig) -> dict[str, Any]:
    layers = range(config.num_layers)
    windowed = layers if config.window_layers is None else config.window_layers
    sliding = set() if config.sliding_window is None else set(windowed)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": config.sliding_window,
        "max_window_layers": min(sliding, default=config.num_layers),
        "layer_types": ["sliding_attention" if layer in sliding else "full_attention" for layer in layers],
    }


def tensor_mappings(config: LlamaConfig, kind: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    mappings = decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_block, config))
    if kind != "gemma3_text":
        return mappings
    # Gemma's norms multiply by one plus their weight.
    return [replace(each, offset=1.0) if each.ours.endswith("norm.weight") else each for each in mappings]


def _block(config: LlamaConfig, ours: str, theirs: str) -> list[TensorMapping]:
    names = dict(LLAMA_NORMS)
    layers = {name: (f"self_attn.{name[0]}_proj", config.qkv_bias) for name in ("query", "key", "value")}
    layers["out"] = ("self_attn.o_proj", config.out_bias)
    linears = {f"attention.{name}": layer for name, layer in layers.items()}
    linears |= {f"mlp.{name}": (f"mlp.{name}_proj", config.mlp_bias) for name in ("gate", "up", "down")}
    for name, (source, has_bias) in linears.items():
        names |= {f"{name}.{kind}": f"{source}.{kind}" for kind in (("weight", "bias") if has_bias else ("weight",))}
    if config.qk_norm:
        names["attention.query_norm.weight"] = "self_attn.q_norm.weight"
        names["attention.key_norm.weight"] = "self_attn.k_norm.weight"
    if config.sandwich_norms:
        names["attention_out_norm.weight"] = names["mlp_norm.weight"]
        names["mlp_norm.weight"] = "pre_feedforward_layernorm.weight"
        names["mlp_out_norm.weight"] = "post_feedforward_layernorm.weight"
    return [TensorMapping(ours=ours + name, theirs=theirs + source) for name, source in names.items()]


CONVERTER = Converter(
    ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text"),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("model.",),
    ignored_suffixes=("rotary_emb.inv_freq",),
)
