"""Conversion of BERT and RoBERTa, with the head for masked tokens or without one."""

from collections.abc import Mapping
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.bert.model import BertConfig
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.weight_mapping import Converter, TensorMapping, checked

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a BERT of another architecture",
    obeyed="""attention_probs_dropout_prob hidden_act hidden_dropout_prob hidden_size intermediate_size layer_norm_eps
    max_position_embeddings num_attention_heads num_hidden_layers pad_token_id type_vocab_size""",
    accepted={"is_causal": (False, None), "is_decoder": (False, None), "position_embedding_type": ("absolute", None)},
    unused="classifier_dropout gradient_checkpointing pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type directionality sentence_transformers sbert_ce_default_activation_function",
)
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# The ends of the names of classes whose folders hold a head for masked tokens.
_HEADED = ("ForMaskedLM", "ForPreTraining")


def read_config(config: Mapping[str, Any]) -> BertConfig:
    """Our options from config.json. Raises ModelError."""
    classes = config.get("architectures") or ["BertForMaskedLM"]
    config = checked(config, _KEYS)
    activation = config.given("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelError("a BERT of another activation", got=activation, expected=", ".join(_ACTIVATIONS))
    config.check(config.flag("tie_word_embeddings", True), "tie_word_embeddings", "true")
    names = "bert" if config["model_type"] == "bert" else "roberta"
    first = 0 if names == "bert" else config.count("pad_token_id", 1) + 1
    dropout = config.number("hidden_dropout_prob", 0.1, below=1.0)
    return BertConfig(
        vocab_size=config.count("vocab_size"),
        dim=config.count("hidden_size"),
        num_layers=config.count("num_hidden_layers", largest=MAX_LAYERS),
        num_heads=config.count("num_attention_heads"),
        max_length=config.count("max_position_embeddings", 512) - first,
        mlp_dim=config.count("intermediate_size"),
        activation=_ACTIVATIONS[activation],  # type: ignore[arg-type]
        norm_eps=config.number("layer_norm_eps", 1e-12, below=1.0),
        embedding_dropout=dropout,
        attention_dropout=config.number("attention_probs_dropout_prob", 0.1, below=1.0),
        residual_dropout=dropout,
        num_token_types=config.count("type_vocab_size", 2),
        first_position=first,
        lm_head=any(isinstance(each, str) and each.endswith(_HEADED) for each in classes),
        names=names,  # type: ignore[arg-type]
    )


def write_config(config: BertConfig) -> dict[str, Any]:
    """The values of config.json."""
    name = "Bert" if config.names == "bert" else "Roberta"
    return {
        "architectures": [f"{name}{_HEADED[0] if config.lm_head else 'Model'}"],
        "model_type": config.names,
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim or 4 * config.dim,
        "max_position_embeddings": config.max_length + config.first_position,
        "hidden_act": "gelu_new" if config.activation == "gelu_tanh" else config.activation,
        "layer_norm_eps": config.norm_eps,
        "hidden_dropout_prob": config.residual_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "type_vocab_size": config.num_token_types,
        "tie_word_embeddings": True,
    } | ({} if config.names == "bert" else {"pad_token_id": config.first_position - 1})


_OUTER = {
    "embedding.weight": "embeddings.word_embeddings.weight",
    "position.weight": "embeddings.position_embeddings.weight",
    "token_type.weight": "embeddings.token_type_embeddings.weight",
    "embedding_norm.weight": "embeddings.LayerNorm.weight",
    "embedding_norm.bias": "embeddings.LayerNorm.bias",
}
_BLOCK = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
    "mlp_norm": "output.LayerNorm",
}
_HEAD = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
}


def tensor_mappings(config: BertConfig, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    names = {ours: f"{config.names}.{theirs}" for ours, theirs in _OUTER.items()}
    for layer in range(config.num_layers):
        for ours, theirs in _BLOCK.items():
            for kind in ("weight", "bias"):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"{config.names}.encoder.layer.{layer}.{theirs}.{kind}"
    if config.lm_head:
        dense, norm, bias = _HEAD[config.names]
        names |= {f"head_dense.{kind}": f"{dense}.{kind}" for kind in ("weight", "bias")}
        names |= {f"head_norm.{kind}": f"{norm}.{kind}" for kind in ("weight", "bias")} | {"head_bias": bias}
    return [TensorMapping(ours=ours, theirs=theirs) for ours, theirs in names.items()]


CONVERTER = Converter(
    ("bert", "roberta", "xlm-roberta"),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("bert.", "roberta."),
    # Copies of tied tensors, what transformers counts with, and heads for other tasks of the pretraining.
    ignored_suffixes=(
        *("predictions.decoder.weight", "predictions.decoder.bias", "lm_head.decoder.weight", "lm_head.decoder.bias"),
        *("embeddings.position_ids", "embeddings.token_type_ids"),
        *("pooler.dense.weight", "pooler.dense.bias", "seq_relationship.weight", "seq_relationship.bias"),
    ),
)
