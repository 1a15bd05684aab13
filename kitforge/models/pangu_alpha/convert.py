"""Conversion of PanGu-alpha, in the names of its PyTorch port (`model_type: gpt_pangu`)."""

from collections.abc import Mapping
from typing import Any

from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.pangu_alpha.model import PanguAlphaConfig
from kitforge.models.weight_mapping import Converter, GptKeys, TensorMapping, checked, decoder_mappings

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a PanGu-alpha of another architecture",
    obeyed="""activation_function attn_pdrop embd_pdrop hidden_size intermediate_size layer_norm_epsilon
    max_position_embeddings num_heads num_layers resid_pdrop""",
    accepted={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": (False, None)},
)
_NAMES = GptKeys(
    dim="hidden_size",
    num_layers="num_layers",
    num_heads="num_heads",
    max_length="max_position_embeddings",
    mlp_dim="intermediate_size",
    embedding_dropout="embd_pdrop",
    attention_dropout="attn_pdrop",
    residual_dropout="resid_pdrop",
)
# MindSpore calls the activation of the published training fast_gelu; `gelu_fast` of Hugging Face is another one.
_ACTIVATIONS = {"quick_gelu": "quick_gelu", "fast_gelu": "quick_gelu", "gelu": "gelu", "gelu_new": "gelu_tanh"}


def read_config(config: Mapping[str, Any]) -> PanguAlphaConfig:
    """Our options from config.json. Raises ModelError."""
    config = checked(config, _KEYS, {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"})
    activation = config.get("activation_function", "gelu")
    config.check(activation in _ACTIVATIONS, "activation_function", ", ".join(_ACTIVATIONS))
    values = _NAMES.read(config, max_length=1024, dropout=0.1)
    return PanguAlphaConfig(**values, activation=_ACTIVATIONS[activation])  # type: ignore[arg-type]


def write_config(config: PanguAlphaConfig) -> dict[str, Any]:
    """The values of config.json."""
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs != "fast_gelu"}
    own = {"activation_function": names[config.activation]}
    return {"architectures": ["GPTPanguForCausalLM"], "model_type": "gpt_pangu"} | _NAMES.write(config) | own


def tensor_mappings(config: PanguAlphaConfig, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs. Their norm before the query layer is of the whole network; ours is of the layer."""
    top = f"blocks.{config.num_layers - 1}."
    theirs = {
        "embedding.weight": "transformer.wte.weight",
        "position.weight": "transformer.wpe.weight",
        f"{top}query_position.weight": "transformer.wqe.weight",
        f"{top}input_norm.weight": "transformer.ln_f.weight",
        f"{top}input_norm.bias": "transformer.ln_f.bias",
        "output": "lm_head.weight",
    }
    return decoder_mappings(config, theirs, "transformer.h", _block)


_LAYERS = {
    "attention_norm": "ln_1",
    "attention.query": "attn.q_proj",
    "attention.key": "attn.k_proj",
    "attention.value": "attn.v_proj",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}


def _block(ours: str, theirs: str) -> list[TensorMapping]:
    return [
        TensorMapping(ours=f"{ours}{name}.{kind}", theirs=f"{theirs}{source}.{kind}")
        for name, source in _LAYERS.items()
        for kind in ("weight", "bias")
    ]


CONVERTER = Converter(
    ("gpt_pangu",),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("transformer.",),
    ignored_suffixes=("attn.bias", "attn.masked_bias"),
)
