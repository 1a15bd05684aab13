"""Conversion of ViT with a classifier. transformers 5 still writes the names of version 4."""

from collections.abc import Mapping
from typing import Any

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.foundation.errors import ModelError
from kitforge.models.config_keys import CONFIG_KEYS
from kitforge.models.vit.model import ViTConfig
from kitforge.models.weight_mapping import Converter, TensorMapping, checked

_KEYS = CONFIG_KEYS.with_keys(
    refusal="a ViT of another architecture",
    obeyed="""attention_probs_dropout_prob hidden_act hidden_dropout_prob hidden_size image_mean image_size image_std
    intermediate_size layer_norm_eps num_attention_heads num_channels num_hidden_layers patch_size qkv_bias""",
    # Attention in both directions, and no pooler before the classifier.
    accepted={"is_causal": (False, None)},
    unused="encoder_stride pooler_act pooler_output_size",
)
_PROBLEM_TYPES = ("single_label_classification", "multi_label_classification", "regression")
_ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def read_config(config: Mapping[str, Any]) -> ViTConfig:
    """Our options from config.json, with image_mean and image_std of preprocessor_config.json where they are added.
    Raises ModelError."""
    config = checked(config, _KEYS)
    activation = config.given("hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        raise ModelError("a ViT of another activation", got=activation, expected=", ".join(_ACTIVATIONS))
    labels = config.group("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    names = {str(number): label for number, label in labels.items()}
    is_whole = all(isinstance(names.get(str(number)), str) for number in range(len(names)))
    config.check(is_whole, "id2label", "a label for each number from 0 on")
    problem_type = config.given("problem_type", _PROBLEM_TYPES[0])
    config.check(problem_type in _PROBLEM_TYPES, "problem_type", " or ".join(_PROBLEM_TYPES))
    channels = config.count("num_channels", 3)
    normalized: Any = {
        name: tuple(map(float, config.given(name, [0.5] * channels))) for name in ("image_mean", "image_std")
    }
    return ViTConfig(
        dim=config.count("hidden_size"),
        num_layers=config.count("num_hidden_layers", largest=MAX_LAYERS),
        num_heads=config.count("num_attention_heads"),
        labels=tuple(names[str(number)] for number in range(len(names))),
        problem_type=problem_type,
        image_size=config.count("image_size", 224),
        patch_size=config.count("patch_size", 16),
        num_channels=channels,
        mlp_dim=config.count("intermediate_size", 3072),
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        norm_eps=config.number("layer_norm_eps", 1e-12, below=1.0),
        qkv_bias=config.flag("qkv_bias", True),
        embedding_dropout=config.number("hidden_dropout_prob", 0.0, below=1.0),
        attention_dropout=config.number("attention_probs_dropout_prob", 0.0, below=1.0),
        residual_dropout=config.number("hidden_dropout_prob", 0.0, below=1.0),
        **normalized,
    )


def write_config(config: ViTConfig) -> dict[str, Any]:
    """The values of config.json."""
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.mlp_dim or 4 * config.dim,
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "hidden_act": "gelu" if config.activation == "gelu" else "gelu_pytorch_tanh",
        "layer_norm_eps": config.norm_eps,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": config.residual_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "id2label": {str(number): str(label) for number, label in enumerate(config.labels)},
        "label2id": {str(label): number for number, label in enumerate(config.labels)},
    } | ({} if config.problem_type == _PROBLEM_TYPES[0] else {"problem_type": config.problem_type})


_OUTER = {
    "class_token": "vit.embeddings.cls_token",
    "position": "vit.embeddings.position_embeddings",
    "patches.weight": "vit.embeddings.patch_embeddings.projection.weight",
    "patches.bias": "vit.embeddings.patch_embeddings.projection.bias",
    "norm.weight": "vit.layernorm.weight",
    "norm.bias": "vit.layernorm.bias",
    "classifier.weight": "classifier.weight",
    "classifier.bias": "classifier.bias",
}
_BLOCK = {
    "attention_norm": "layernorm_before",
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "attention.out": "attention.output.dense",
    "mlp_norm": "layernorm_after",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}


def tensor_mappings(config: ViTConfig, _model_type: str) -> list[TensorMapping]:
    """Our tensors and theirs."""
    names = dict(_OUTER)
    for layer in range(config.num_layers):
        for ours, theirs in _BLOCK.items():
            has_bias = config.qkv_bias or theirs.startswith(("attention.output", "layernorm", "intermediate", "output"))
            for kind in ("weight", "bias") if has_bias else ("weight",):
                names[f"blocks.{layer}.{ours}.{kind}"] = f"vit.encoder.layer.{layer}.{theirs}.{kind}"
    return [TensorMapping(ours=ours, theirs=theirs) for ours, theirs in names.items()]


CONVERTER = Converter(
    ("vit",),
    read_config,
    write_config,
    tensor_mappings,
    prefixes=("vit.",),
    ignored_suffixes=("vit.pooler.dense.weight", "vit.pooler.dense.bias"),
)
