"""Conversion of GLM and GLM-4-0414; ChatGLM2/3 folders are read only."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.glm.model import GLMConfig
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
    write_shared_keys,
)


def read_config(config: Mapping[str, Any]) -> GLMConfig:
    """Our options from config.json. Raises ModelError."""
    is_chatglm = config["model_type"] == "chatglm"
    known = checked(config, _CHATGLM_KEYS if is_chatglm else _GLM_KEYS)
    return _read_chatglm(known) if is_chatglm else _read_glm(known)


_GLM_KEYS = SHARED_KEYS.with_keys(refusal="a GLM of another architecture", unused="layer_types")
_CHATGLM_KEYS = CONFIG_KEYS.with_keys(
    refusal="a ChatGLM of another architecture",
    obeyed="""add_qkv_bias ffn_hidden_size hidden_size kv_channels layernorm_epsilon multi_query_attention
    multi_query_group_num num_attention_heads num_layers padded_vocab_size rope_ratio seq_length""",
    accepted={
        "rmsnorm": True,
        "add_bias_linear": False,
        "post_layer_norm": True,
        "apply_residual_connection_post_layernorm": False,
        "interleaved_qkv": (False, None),
        "original_rope": (True, None),
        "pre_seq_len": (None, 0),
        "prefix_projection": (False, None),
        "quantization_bit": (0, None),
    },
    unused="""apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion fp32_residual_connection
    num_hidden_layers""",
)


def _read_glm(config: ConfigFile) -> GLMConfig:
    return GLMConfig(
        **read_shared_keys(config),
        num_kv_heads=config.count("num_key_value_heads"),
        head_dim=config.optional_count("head_dim", 128),
        max_length=config.count("max_position_embeddings", 131072),
        norm_eps=config.number("rms_norm_eps", 1.5625e-07, below=1.0),
        rotary_fraction=read_rope(config).get("fraction", 0.5),
        qkv_bias=config.flag("attention_bias", True),
        sandwich_norms=config["model_type"] == "glm4",
    )


def _read_chatglm(config: ConfigFile) -> GLMConfig:
    """ChatGLM2/3 and the first release of glm-4-9b: the same network under other names."""
    heads = config.count("num_attention_heads")
    grouped = config.flag("multi_query_attention", False)
    return GLMConfig(
        vocab_size=config.count("padded_vocab_size"),
        dim=config.count("hidden_size"),
        num_layers=config.count("num_layers", largest=MAX_LAYERS),
        num_heads=heads,
        num_kv_heads=config.count("multi_query_group_num") if grouped else heads,
        head_dim=config.count("kv_channels"),
        mlp_dim=config.count("ffn_hidden_size"),
        max_length=config.count("seq_length"),
        norm_eps=config.number("layernorm_epsilon", 1e-5, below=1.0),
        rope_theta=10000.0 * config.number("rope_ratio", 1.0, least=1e-4, below=1e12),
        qkv_bias=config.flag("add_qkv_bias", True),
        tie_embeddings=config.flag("tie_word_embeddings", False),
    )


def write_config(config: GLMConfig) -> dict[str, Any]:
    """The values of config.json."""
    kind, name = ("glm4", "Glm4ForCausalLM") if config.sandwich_norms else ("glm", "GlmForCausalLM")
    return write_shared_keys(config, config.rotary_fraction) | {
        "architectures": [name],
        "model_type": kind,
        "attention_bias": config.qkv_bias,
        "pad_token_id": None,
        "eos_token_id": None,
    }


def tensor_mappings(config: GLMConfig, model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs, whose names depend on the generation of the folder."""
    if model_type == "chatglm":
        theirs = {
            "embedding.weight": "transformer.embedding.word_embeddings.weight",
            "norm.weight": "transformer.encoder.final_layernorm.weight",
            "output": "transformer.output_layer.weight",
        }
        return decoder_mappings(config, theirs, "transformer.encoder.layers", partial(_chatglm_block, config))
    return decoder_mappings(config, LLAMA_NAMES, "model.layers", partial(_glm_block, config))


def _glm_block(config: GLMConfig, ours: str, theirs: str) -> list[TensorMapping]:
    names = LLAMA_NORMS | {"attention.out.weight": "self_attn.o_proj.weight", "mlp.down.weight": "mlp.down_proj.weight"}
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        for name in ("query", "key", "value"):
            names[f"attention.{name}.{kind}"] = f"self_attn.{name[0]}_proj.{kind}"
    if config.sandwich_norms:
        names["attention_out_norm.weight"] = "post_self_attn_layernorm.weight"
        names["mlp_out_norm.weight"] = "post_mlp_layernorm.weight"
    mappings = [TensorMapping(ours=ours + name, theirs=theirs + source) for name, source in names.items()]
    return mappings + _gate_and_up(config, ours, f"{theirs}mlp.gate_up_proj.weight")


def _chatglm_block(config: GLMConfig, ours: str, theirs: str) -> list[TensorMapping]:
    """One matrix holds query, key and value: all heads, then the key groups, then the value groups."""
    own = {"attention.out.weight": "self_attention.dense.weight", "mlp.down.weight": "mlp.dense_4h_to_h.weight"}
    names = LLAMA_NORMS | own
    mappings = [TensorMapping(ours=ours + name, theirs=theirs + source) for name, source in names.items()]
    queries, keys = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    parts = {"query": (0, queries), "key": (queries, keys), "value": (queries + keys, keys)}
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        source = f"{theirs}self_attention.query_key_value.{kind}"
        for name, (start, rows) in parts.items():
            mappings.append(TensorMapping(ours=f"{ours}attention.{name}.{kind}", theirs=source, start=start, rows=rows))
    return mappings + _gate_and_up(config, ours, f"{theirs}mlp.dense_h_to_4h.weight")


def _gate_and_up(config: GLMConfig, ours: str, theirs: str) -> list[TensorMapping]:
    starts = {"gate": 0, "up": config.mlp_dim}
    return [
        TensorMapping(ours=f"{ours}mlp.{name}.weight", theirs=theirs, start=start, rows=config.mlp_dim)
        for name, start in starts.items()
    ]


CONVERTER = Converter(
    ("glm", "glm4", "chatglm"),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("model.", "transformer."),
    ignored_suffixes=("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq"),
)
