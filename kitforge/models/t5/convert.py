"""Conversion of T5, its version 1.1, Flan-T5 and mT5."""

from collections.abc import Mapping
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.t5.model import T5Config
from kitforge.models.weight_mapping import Converter, TensorMapping, checked

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a T5 of another architecture",
    obeyed="""d_ff d_kv d_model dense_act_fn dropout_rate feed_forward_proj is_gated_act layer_norm_epsilon n_positions
    num_decoder_layers num_heads num_layers relative_attention_max_distance relative_attention_num_buckets
    scale_decoder_outputs""",
    accepted={"is_causal": (True, False, None), "is_encoder_decoder": (True,)},
)
_ALIASES = {"hidden_size": "d_model", "num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"}
_ALIASES |= {"head_dim": "d_kv"}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu"}


def read_config(config: Mapping[str, Any]) -> T5Config:
    """Our options from config.json. Raises ModelError."""
    config = checked(config, _KEYS, _ALIASES)
    # The defaults of mT5 are those of version 1.1.
    is_mt5 = config["model_type"] == "mt5"
    activation = config.given("feed_forward_proj", "gated-gelu" if is_mt5 else "relu")
    if activation not in _ACTIVATIONS:
        raise ModelError("a T5 of another activation", got=activation, expected=" or ".join(_ACTIVATIONS))
    gated = activation == "gated-gelu"
    is_own = config.given("is_gated_act", gated) is gated
    config.check(is_own, "is_gated_act", f"{gated}, as feed_forward_proj={activation} has it")
    own = "gelu_new" if gated else "relu"
    config.check(config.given("dense_act_fn", own) == own, "dense_act_fn", f"{own}, as feed_forward_proj has it")
    is_tied = config.flag("tie_word_embeddings", not is_mt5)
    start: int | None = config.get("decoder_start_token_id")
    is_token = isinstance(start, int) and not isinstance(start, bool) and 0 <= start < config.count("vocab_size")
    config.check(start is None or is_token, "decoder_start_token_id", "a token of the vocabulary")
    return T5Config(
        vocab_size=config.count("vocab_size"),
        dim=config.count("d_model"),
        num_layers=config.count("num_layers", largest=MAX_LAYERS),
        num_decoder_layers=config.optional_count("num_decoder_layers"),
        num_heads=config.count("num_heads"),
        head_dim=config.count("d_kv", 64),
        mlp_dim=config.count("d_ff"),
        max_length=config.count("n_positions", 512),
        activation="geglu" if activation == "gated-gelu" else "relu",
        norm_eps=config.number("layer_norm_epsilon", 1e-6, below=1.0),
        num_buckets=config.count("relative_attention_num_buckets", 32, largest=2**16),
        max_distance=config.count("relative_attention_max_distance", 128),
        tie_embeddings=is_tied,
        # transformers 5 always writes the embeddings as tied, and whether they were under a key of its own.
        scale_output=config.flag("scale_decoder_outputs", is_tied),
        dropout=config.number("dropout_rate", 0.1, below=1.0),
        decoder_start_id=start,
    )


def write_config(config: T5Config) -> dict[str, Any]:
    """The values of config.json; without `decoder_start_token_id` where the tokenizer decides it."""
    start = {} if config.decoder_start_id is None else {"decoder_start_token_id": config.decoder_start_id}
    return start | {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "d_kv": config.head_dim,
        "d_ff": config.mlp_dim,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.num_decoder_layers or config.num_layers,
        "num_heads": config.num_heads,
        "n_positions": config.max_length,
        "feed_forward_proj": "gated-gelu" if config.activation == "geglu" else "relu",
        "layer_norm_epsilon": config.norm_eps,
        "relative_attention_num_buckets": config.num_buckets,
        "relative_attention_max_distance": config.max_distance,
        "tie_word_embeddings": config.tie_embeddings,
        "scale_decoder_outputs": config.scales_output,
        "dropout_rate": config.dropout,
    }


_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


def tensor_mappings(config: T5Config, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    names = {"embedding": "shared"}
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers or config.num_layers)):
        names[f"{stack}.relative"] = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        for layer in range(layers):
            block = _block(config, is_decoder=stack == "decoder")
            names |= {f"{stack}.blocks.{layer}.{ours}": f"{stack}.block.{layer}.{own}" for ours, own in block.items()}
        names[f"{stack}.norm"] = f"{stack}.final_layer_norm"
    mappings = [TensorMapping(ours=f"{ours}.weight", theirs=f"{own}.weight") for ours, own in names.items()]
    return mappings if config.tie_embeddings else [*mappings, TensorMapping(ours="output", theirs="lm_head.weight")]


def _block(config: T5Config, *, is_decoder: bool) -> dict[str, str]:
    last = 2 if is_decoder else 1
    names = {"attention_norm": "layer.0.layer_norm", "mlp_norm": f"layer.{last}.layer_norm"}
    names |= {f"attention.{ours}": f"layer.0.SelfAttention.{own}" for ours, own in _ATTENTION.items()}
    if is_decoder:
        names |= {"cross_norm": "layer.1.layer_norm"}
        names |= {f"cross.{ours}": f"layer.1.EncDecAttention.{own}" for ours, own in _ATTENTION.items()}
    gated = {"mlp.gate": "wi_0", "mlp.up": "wi_1", "mlp.down": "wo"}
    linears = gated if config.activation == "geglu" else {"mlp.up": "wi", "mlp.down": "wo"}
    return names | {ours: f"layer.{last}.DenseReluDense.{own}" for ours, own in linears.items()}


CONVERTER = Converter(
    ("t5", "mt5"),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=(),
    ignored_suffixes=(".embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
)
