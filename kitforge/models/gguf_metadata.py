"""Which entries of a GGUF file's metadata are obeyed, and which change nothing; others are refused.

Keys, their defaults and their meaning in the architectures that are read here are those of llama.cpp's model loader.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kitforge.foundation.errors import ModelError

# Of the architecture: read by `GgufWeights`, or of no consequence.
_READ = frozenset(
    (
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length"),
        *("feed_forward_length", "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.type", "attention.scale"),
    )
)
# Of mixtures of experts.
EXPERT_ARCHITECTURES = ("llama", "qwen3moe")
_EXPERTS = frozenset(("expert_count", "expert_used_count", "expert_feed_forward_length"))
_WITHOUT_EFFECT = frozenset(
    ("pooling_type", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size", "attention.sliding_window")
)
# Of YaRN: the names in config.json, and the values that llama.cpp takes where the key is missing.
_YARN = {"rope.scaling.yarn_beta_fast": ("beta_fast", 32.0), "rope.scaling.yarn_beta_slow": ("beta_slow", 1.0)}
_ATTENTION_FACTORS = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor")
# Keys of which a value other than nothing has a meaning of its own.
_DEFAULTS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "logit_scale": (0, 1),
    "attention.output_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
}
_TOKENIZER = frozenset(
    (
        *("model", "pre", "tokens", "token_type", "token_type_count", "scores", "merges", "add_bos_token"),
        *("add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    )
)


def check_metadata(path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
    """Raise ModelError for an entry that could change what is computed and is not obeyed."""
    for name, value in metadata.items():
        owner, _, key = name.partition(".")
        if owner == architecture:
            known = key in _READ or key in _WITHOUT_EFFECT or key in _YARN or key in _ATTENTION_FACTORS
            known |= key in _EXPERTS and architecture in EXPERT_ARCHITECTURES
            defaults = _DEFAULTS.get(key, (0,))
        elif name.startswith("tokenizer.ggml."):
            key = key.removeprefix("ggml.")
            known, defaults = key in _TOKENIZER or key.endswith("_token_id"), (0,)
        else:
            # Notes of whoever made the file, but for the parts of a file that was split.
            known, defaults = name != "split.count", (0, 1)
        if not known and not _is_default(value, defaults):
            expected = f"no such entry, or {' or '.join(map(str, defaults))}"
            raise ModelError(
                f"{path} has an entry that is not obeyed", got=f"{name}={str(value)[:60]}", expected=expected
            )


def read_scaling(path: Path, metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The scaling of rotary positions, as `rope_parameters` of config.json; empty for none. Raises ModelError for one
    that is not known."""
    entries = {key: metadata.get(f"{architecture}.{key}") for key in ("rope.scaling.type", "rope.scaling.factor")}
    older = metadata.get(f"{architecture}.rope.scale_linear")
    kind = "linear" if entries["rope.scaling.type"] is None else entries["rope.scaling.type"]
    factor = older if entries["rope.scaling.factor"] is None else entries["rope.scaling.factor"]
    factor = factor or 1.0
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ModelError(f"{path} has an impossible rope.scaling.factor", got=factor, expected="a number above 0")
    attention = math.prod(float(metadata.get(f"{architecture}.{key}") or 1.0) for key in _ATTENTION_FACTORS)
    if kind not in ("none", "linear", "yarn"):
        got = f"{architecture}.rope.scaling.type={kind}"
        raise ModelError(f"{path} scales its positions in an unknown way", got=got, expected="none, linear or yarn")
    if kind != "yarn":
        if attention != 1:
            got = f"{' * '.join(_ATTENTION_FACTORS)} = {attention:g} with {kind}"
            raise ModelError(f"{path} scales its positions in an unknown way", got=got, expected="1 without yarn")
        return {} if kind == "none" or factor == 1 else {"rope_type": "linear", "factor": float(factor)}
    found: dict[str, Any] = {"rope_type": "yarn", "factor": float(factor)}
    if attention != 1:
        found["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    for key, (name, default) in _YARN.items():
        found[name] = float(metadata.get(f"{architecture}.{key}", default))
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    return found | ({} if original is None else {"original_max_position_embeddings": original})


def check_heads(path: Path, metadata: Mapping[str, Any], architecture: str, head_dim: int) -> None:
    """Raise ModelError for heads that are scaled, cut or rotated otherwise than those of config.json."""
    wanted = {key: head_dim for key in ("attention.value_length", "rope.dimension_count")}
    for key, expected in {**wanted, "attention.scale": head_dim**-0.5}.items():
        value = metadata.get(f"{architecture}.{key}")
        if value and not math.isclose(value, expected, rel_tol=1e-6):
            message = f"{path} has heads that are computed in another way"
            raise ModelError(message, got=f"{architecture}.{key}={value}", expected=f"{expected:g}, or no such entry")


def _is_default(value: object, defaults: tuple[Any, ...]) -> bool:
    if isinstance(value, list):
        return all(each in defaults for each in value)
    return not value and 0 in defaults if isinstance(value, str) else value in defaults
