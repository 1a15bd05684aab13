"""Conversion of GPT-2. Hugging Face stores its matrices transposed (Conv1D)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.weight_mapping import Converter, TensorMapping, checked, decoder_mappings

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a GPT-2 of another architecture",
    obeyed="""activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions
    resid_pdrop scale_attn_by_inverse_layer_idx""",
    accepted={"scale_attn_weights": True},
)
_ALIASES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


def read_config(config: Mapping[str, Any]) -> GPT2Config:
    """Our options from config.json. Raises ModelError."""
    config = checked(config, _KEYS, _ALIASES)
    activation = config.get("activation_function", "gelu_new")
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise ModelError("GPT-2 with another activation", got=activation, expected="gelu_new")
    return GPT2Config(
        vocab_size=config.count("vocab_size"),
        dim=config.count("n_embd"),
        num_layers=config.count("n_layer", largest=MAX_LAYERS),
        num_heads=config.count("n_head"),
        max_length=config.count("n_positions", 1024),
        mlp_dim=config.optional_count("n_inner"),
        norm_eps=config.number("layer_norm_epsilon", 1e-5, below=1.0),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        embedding_dropout=config.number("embd_pdrop", 0.1, below=1.0),
        attention_dropout=config.number("attn_pdrop", 0.1, below=1.0),
        residual_dropout=config.number("resid_pdrop", 0.1, below=1.0),
        scale_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False),
    )


def write_config(config: GPT2Config) -> dict[str, Any]:
    """The values of config.json."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.max_length,
        "n_inner": config.mlp_dim,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tie_embeddings,
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.residual_dropout,
        "scale_attn_by_inverse_layer_idx": config.scale_by_layer,
    }


def tensor_mappings(config: GPT2Config, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    theirs = {
        "embedding.weight": "transformer.wte.weight",
        "position.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "output": "lm_head.weight",
    }
    return decoder_mappings(config, theirs, "transformer.h", partial(_block, config.dim))


def _block(dim: int, ours: str, theirs: str) -> list[TensorMapping]:
    mappings = []
    for kind in ("weight", "bias"):
        matrix = kind == "weight"
        for index, name in enumerate(("query", "key", "value")):
            source = f"{theirs}attn.c_attn.{kind}"
            name = f"{ours}attention.{name}.{kind}"
            mappings.append(TensorMapping(ours=name, theirs=source, transpose=matrix, start=index * dim, rows=dim))
        for name, source in (("attention.out", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj")):
            mappings.append(
                TensorMapping(ours=f"{ours}{name}.{kind}", theirs=f"{theirs}{source}.{kind}", transpose=matrix)
            )
        for name, source in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            mappings.append(TensorMapping(ours=f"{ours}{name}.{kind}", theirs=f"{theirs}{source}.{kind}"))
    return mappings


CONVERTER = Converter(
    ("gpt2",),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("transformer.",),
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
)
