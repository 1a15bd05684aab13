"""Conversion of BLOOM. Hugging Face stores query, key and value of one head after the other in one matrix."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.models.bloom.model import BloomConfig
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.weight_mapping import Converter, GptKeys, TensorMapping, checked, decoder_mappings

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a BLOOM of another architecture",
    obeyed="attention_dropout hidden_dropout hidden_size layer_norm_epsilon n_head n_layer seq_length",
    accepted={"apply_residual_connection_post_layernorm": False},
    unused="""attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion n_embed n_inner offset_alibi
    skip_bias_add skip_bias_add_qkv""",
)
_NAMES = GptKeys(
    dim="hidden_size",
    num_layers="n_layer",
    num_heads="n_head",
    max_length="seq_length",
    attention_dropout="attention_dropout",
    residual_dropout="hidden_dropout",
)
# The first checkpoints of BLOOM name the width and the counts otherwise.
_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def read_config(config: Mapping[str, Any]) -> BloomConfig:
    """Our options from config.json. Raises ModelError."""
    old = {"hidden_size": config["n_embed"]} if "n_embed" in config else {}
    config = checked(old | dict(config), _KEYS, _ALIASES)
    return BloomConfig(**_NAMES.read(config, max_length=2048, dropout=0.0))


def write_config(config: BloomConfig) -> dict[str, Any]:
    """The values of config.json."""
    kind = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"}
    return kind | _NAMES.write(config) | {"apply_residual_connection_post_layernorm": False}


def tensor_mappings(config: BloomConfig, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    norms = {"embedding_norm": "word_embeddings_layernorm", "norm": "ln_f"}
    theirs = {"embedding.weight": "transformer.word_embeddings.weight", "output": "lm_head.weight"}
    for ours, name in norms.items():
        theirs |= {f"{ours}.{kind}": f"transformer.{name}.{kind}" for kind in ("weight", "bias")}
    return decoder_mappings(config, theirs, "transformer.h", partial(_block, config.dim // config.num_heads))


_LAYERS = {
    "attention_norm": "input_layernorm",
    "attention.out": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def _block(head_dim: int, ours: str, theirs: str) -> list[TensorMapping]:
    mappings = []
    for kind in ("weight", "bias"):
        for name, source in _LAYERS.items():
            mappings.append(TensorMapping(ours=f"{ours}{name}.{kind}", theirs=f"{theirs}{source}.{kind}"))
        for index, name in enumerate(("query", "key", "value")):
            mapping = TensorMapping(
                ours=f"{ours}attention.{name}.{kind}",
                theirs=f"{theirs}self_attention.query_key_value.{kind}",
                start=index * head_dim,
                rows=head_dim,
                stride=3 * head_dim,
            )
            mappings.append(mapping)
    return mappings


CONVERTER = Converter(("bloom",), read_config, write_config, tensor_mappings, prefixes=("transformer.",))
