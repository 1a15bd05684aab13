"""Conversion of GPT-2. Hugging Face stores its matrices transposed (Conv1D)."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from kitforge.foundation.errors import ModelError
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.gpt2.model import GPT2Config
from kitforge.models.weight_mapping import Converter, GptKeys, TensorMapping, checked, decoder_mappings

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a GPT-2 of another architecture",
    obeyed="""activation_function attn_pdrop embd_pdrop layer_norm_epsilon n_embd n_head n_inner n_layer n_positions
    resid_pdrop scale_attn_by_inverse_layer_idx""",
    accepted={"scale_attn_weights": True},
)
_NAMES = GptKeys(
    dim="n_embd",
    num_layers="n_layer",
    num_heads="n_head",
    max_length="n_positions",
    mlp_dim="n_inner",
    embedding_dropout="embd_pdrop",
    attention_dropout="attn_pdrop",
    residual_dropout="resid_pdrop",
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
    values = _NAMES.read(config, max_length=1024, dropout=0.1)
    return GPT2Config(**values, scale_by_layer=config.flag("scale_attn_by_inverse_layer_idx", False))


def write_config(config: GPT2Config) -> dict[str, Any]:
    """The values of config.json."""
    own = {"activation_function": "gelu_new", "scale_attn_by_inverse_layer_idx": config.scale_by_layer}
    return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"} | _NAMES.write(config) | own


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
