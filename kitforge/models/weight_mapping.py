"""Conversion of configurations and tensor names between our models and Hugging Face checkpoints, as data that works in
both directions."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import groupby
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from kitforge.core.nn.decoder import MAX_LAYERS
from kitforge.core.nn.moe import ExpertsConfig
from kitforge.core.nn.rotary import RopeScaling
from kitforge.foundation.config import from_dict, to_dict
from kitforge.foundation.errors import ModelError
from kitforge.foundation.known_keys import KnownKeys
from kitforge.foundation.types import Region
from kitforge.models.config_keys import CONFIG_KEYS

# Names of an untied head in Hugging Face checkpoints.
HEADS = ("lm_head.weight", "transformer.output_layer.weight")
MAX_COUNT = 2**31 - 1
# LLaMA's names outside of blocks, for `decoder_mappings`.
LLAMA_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output": "lm_head.weight",
}
# And those of the two norms of a block.
LLAMA_NORMS = {"attention_norm.weight": "input_layernorm.weight", "mlp_norm.weight": "post_attention_layernorm.weight"}
# The gates and the ups of all experts of a block as one tensor [experts, 2 * hidden, dim].
STACKED = "experts.gate_up_proj"


class ConfigFile(dict[str, Any]):
    """A config.json whose values are read with type and range. Null counts as absent, except where None has a meaning.
    Every reader raises ModelError naming the key."""

    name = "config.json"  # for messages

    def __missing__(self, key: str) -> Any:
        raise ModelError(f"{self.name} lacks a key that this architecture needs", got=", ".join(self), expected=key)

    def count(self, key: str, default: int | None = None, *, largest: int = MAX_COUNT) -> int:
        """A whole number from 1 to `largest`; without a default the key is required."""
        value = self[key] if default is None else self.given(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        self.check(is_integer and 1 <= value <= largest, key, f"a whole number from 1 to {largest}")
        return int(value)

    def optional_count(self, key: str, default: int | None = None) -> int | None:
        """A `count`, or None where the file says null."""
        return None if self.get(key, default) is None else self.count(key, default)

    def number(self, key: str, default: float, *, least: float = 0.0, below: float = math.inf) -> float:
        """A number of at least `least` and less than `below`."""
        value = self.given(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self.check(is_number and least <= value < below, key, f"a number of at least {least:g}, below {below:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.given(key, default)
        self.check(isinstance(value, bool), key, "true or false")
        return bool(value)

    def group(self, key: str) -> dict[str, Any]:
        """A nested object; empty where the key is absent."""
        value = self.given(key, {})
        self.check(isinstance(value, Mapping), key, "a JSON object")
        return dict(value)

    def given(self, key: str, default: Any) -> Any:
        """The value, or the default where it is absent or null."""
        value = self.get(key)
        return default if value is None else value

    def check(self, condition: bool, key: str, expected: str) -> None:
        """Raise ModelError about the value of the key unless the condition holds."""
        if not condition:
            got = f"{key}={self.get(key)!r}"[:200]
            raise ModelError(f"{self.name} has an invalid value", got=got, expected=expected)


def checked(
    values: Mapping[str, Any], keys: KnownKeys, aliases: Mapping[str, str] = MappingProxyType({})
) -> ConfigFile:
    """config.json with every key known, and those of `aliases` under their present names unless these are there too.
    Raises ModelError for a key that is unknown, or that asks for what we do not compute."""
    renamed = {name: value for name, value in values.items() if aliases.get(name) not in values}
    config = ConfigFile({aliases.get(name, name): value for name, value in renamed.items()})
    keys.check(config, ModelError)
    for name, present in aliases.items():
        is_same = values.get(name) in (None, config.get(present))
        config.check(is_same, present, f"{name}={values.get(name)}, as the same file has it under another name")
    return config


# The keys that LLaMA, Mistral, Qwen and GLM store alike.
SHARED_KEYS = CONFIG_KEYS.with_keys(
    """attention_bias attention_dropout head_dim hidden_size intermediate_size max_position_embeddings
    num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings partial_rotary_factor
    rms_norm_eps rope_parameters rope_scaling rope_theta""",
    accepted={
        "hidden_act": ("silu", "swish"),
        "rope_interleaved": (False, None),
        "dual_chunk_attention_config": (None, {}),
    },
    unused="is_llama_config",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMapping:
    """Our tensor is `rows` rows from `start` of their tensor, or with a `stride` of every `stride` rows of it, plus
    `offset`. Their tensor is transposed first if `transpose`. With an `index` it is that one of ours along the first
    dim, as the matrix of one expert is."""

    ours: str
    theirs: str
    transpose: bool = False
    start: int = 0
    rows: int | None = None  # None: all of it
    stride: int | None = None
    offset: float = 0.0  # a norm of theirs may multiply by one plus its weight
    dim: int = 0  # of the rows, without a stride
    index: int | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """Our tensor, a view of theirs or, with a stride or an offset (then in float64, exactly), a copy."""
        if self.rows is None:
            return tensor.double() + self.offset if self.offset else tensor
        if self.stride is None:
            return tensor.narrow(self.dim, self.start, self.rows)
        stop = self.start + self.rows
        return tensor.view(-1, self.stride, *tensor.shape[1:])[:, self.start : stop].flatten(0, 1)


class TensorReader(Protocol):
    """Reads one of our tensors, or a region of it."""

    def __call__(self, region: Region | None = None) -> Tensor:
        """The tensor, or the region of it."""


@dataclass(frozen=True, slots=True)
class Converter:
    """The conversion of one family's options and tensors to and from Hugging Face folders."""

    model_types: tuple[str, ...]  # of config.json
    read_config: Callable[[Mapping[str, Any]], Any]  # the options of the family
    write_config: Callable[[Any], dict[str, Any]]
    tensor_mappings: Callable[[Any, str], list[TensorMapping]]  # (config, model_type of the folder)
    _: KW_ONLY
    prefixes: tuple[str, ...]  # of tensor names, which checkpoints of the model without a head lack
    ignored_suffixes: tuple[str, ...] = ()  # of tensors that are no weights
    # The same of folders that hold all experts of a block in one tensor.
    stacked_mappings: Callable[[Any, str], list[TensorMapping]] | None = None

    def mappings_of(self, config: Any, model_type: str, names: Collection[str]) -> list[TensorMapping]:
        """The mappings of a checkpoint that holds `names`. Raises ModelError for one that holds experts twice."""
        stacked = next((name for name in names if name.endswith(f".{STACKED}")), None)
        if self.stacked_mappings is None or stacked is None:
            return self.tensor_mappings(config, model_type)
        single = next((name for name in names if ".experts.0." in name), None)
        if single is not None:
            fix = "remove the tensors of one of the two"
            got = f"{single} and {stacked}"
            raise ModelError("the checkpoint holds its experts twice", got=got, expected="one of the two", fix=fix)
        return self.stacked_mappings(config, model_type)


def decoder_mappings(
    config: Any, theirs: Mapping[str, str], layers: str, block: Callable[[str, str], list[TensorMapping]]
) -> list[TensorMapping]:
    """The mappings of a whole decoder. `theirs` maps our names outside of blocks (`output` is the untied head),
    `layers` is the prefix of their blocks, and `block` gives the mappings of one block for our and their prefix."""
    mappings = [TensorMapping(ours=ours, theirs=name) for ours, name in theirs.items() if ours != "output"]
    for layer in range(config.num_layers):
        mappings += block(f"blocks.{layer}.", f"{layers}.{layer}.")
    return mappings if config.tie_embeddings else [*mappings, TensorMapping(ours="output", theirs=theirs["output"])]


def attention_mappings(ours: str, theirs: str, *, bias: bool = False, qk_norm: bool = False) -> list[TensorMapping]:
    """The mappings of the attention and of both norms of a block under LLaMA's names."""
    names = dict(LLAMA_NORMS)
    for name in ("query", "key", "value", "out"):
        for kind in ("weight", "bias") if bias else ("weight",):
            names[f"attention.{name}.{kind}"] = f"self_attn.{name[0]}_proj.{kind}"
    if qk_norm:
        names["attention.query_norm.weight"] = "self_attn.q_norm.weight"
        names["attention.key_norm.weight"] = "self_attn.k_norm.weight"
    return [TensorMapping(ours=ours + name, theirs=theirs + source) for name, source in names.items()]


def expert_mappings(
    ours: str, theirs: str, num_experts: int, names: Mapping[str, str], after: str = ".weight"
) -> list[TensorMapping]:
    """The mappings of experts that each have tensors of their own, whose names are `theirs`, the number of the expert,
    and the value of `names` for ours."""
    return [
        TensorMapping(ours=ours + own, theirs=f"{theirs}{expert}.{name}{after}", index=expert)
        for own, name in names.items()
        for expert in range(num_experts)
    ]


def stacked_expert_mappings(ours: str, theirs: str, hidden_dim: int) -> list[TensorMapping]:
    """The mappings of the experts of a block that lie in two tensors, as in the modules of `transformers` 5."""
    both = [
        TensorMapping(ours=ours + own, theirs=f"{theirs}gate_up_proj", start=start, rows=hidden_dim, dim=1)
        for own, start in (("gate", 0), ("up", hidden_dim))
    ]
    return [*both, TensorMapping(ours=f"{ours}down", theirs=f"{theirs}down_proj")]


def import_tensors(
    converter: Converter, mappings: Sequence[TensorMapping], names: Iterable[str], read: Callable[[str], Tensor]
) -> dict[str, TensorReader]:
    """Readers of our tensors by name, from a checkpoint that holds `names`. Raises ModelError listing missing and
    unexpected tensors; the head of a model with tied embeddings is unexpected unless it equals the embedding."""
    wanted = {mapping.theirs for mapping in mappings}
    held = _held(converter, mappings, (name for name in names if not name.endswith(converter.ignored_suffixes)))
    missing, surplus = sorted(wanted - held.keys()), sorted(held.keys() - wanted)
    embedding = next((mapping.theirs for mapping in mappings if mapping.ours == "embedding.weight"), None)

    def is_tied(name: str) -> bool:
        return name in HEADS and embedding in held and torch.equal(read(held[name]), read(held[embedding]))

    unexpected = [name for name in surplus if not is_tied(name)]
    if missing or unexpected:
        raise ModelError(
            "the checkpoint does not hold this architecture",
            got=f"{len(missing)} missing {missing[:5]}, {len(unexpected)} unexpected {unexpected[:5]}",
            expected=f"{len(wanted)} tensors",
            fix="check that config.json belongs to these weights",
        )
    ends: dict[str, int] = {}
    for mapping in mappings:
        if mapping.rows is not None and mapping.stride is None:
            ends[mapping.theirs] = max(ends.get(mapping.theirs, 0), mapping.start + mapping.rows)

    def whole(mapping: TensorMapping) -> Tensor:
        tensor = read(held[mapping.theirs])
        tensor = tensor.t() if mapping.transpose else tensor
        held_rows = tensor.shape[mapping.dim]
        rows = ends.get(mapping.theirs, held_rows)
        if rows != held_rows:
            raise ModelError(
                f"tensor {mapping.theirs!r} has another size",
                got=f"{held_rows} rows",
                expected=f"{rows} rows, by config.json",
                fix="check that config.json belongs to these weights",
            )
        return mapping.take(tensor)

    stacks: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        if mapping.index is not None:
            stacks.setdefault(mapping.ours, []).append(mapping)

    def part(mapping: TensorMapping, region: Region | None = None) -> Tensor:
        return whole(mapping) if region is None else region.of(whole(mapping))

    return {
        mapping.ours: partial(part, mapping) if mapping.index is None else partial(_stack, whole, stacks[mapping.ours])
        for mapping in mappings
    }


def _stack(
    whole: Callable[[TensorMapping], Tensor], members: Sequence[TensorMapping], region: Region | None = None
) -> Tensor:
    """Matrices as one tensor, or a region of it, for which only those in it are read."""
    if region is None:
        return torch.stack([whole(each) for each in members])
    first, count = region.offset[0], region.shape[0]
    matrix = Region(global_shape=region.global_shape[1:], offset=region.offset[1:], shape=region.shape[1:])
    # A rank may have none: the dtype is that of any.
    read = members[first : first + count] or members[-1:]
    return torch.stack([matrix.of(whole(each)) for each in read])[:count]


def held_shapes(
    converter: Converter, mappings: Sequence[TensorMapping], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors by the names of the mappings; tensors without a mapping are left out."""
    wanted = {mapping.theirs for mapping in mappings}
    return {name: shapes[own] for name, own in _held(converter, mappings, shapes).items() if name in wanted}


def _held(converter: Converter, mappings: Sequence[TensorMapping], names: Iterable[str]) -> dict[str, str]:
    """The names of a checkpoint by those of the model with a head; it may lack the prefix, or a tied embedding."""
    theirs, found = {mapping.ours: mapping.theirs for mapping in mappings}, dict[str, str]()
    wanted = {mapping.theirs for mapping in mappings}
    for name in names:
        candidates = [name, *(prefix + name for prefix in converter.prefixes)]
        found[next((candidate for candidate in candidates if candidate in wanted), name)] = name
    embedding, head = theirs.get("embedding.weight", ""), next((name for name in HEADS if name in found), None)
    if embedding not in found and head is not None and "output" not in theirs:
        found[embedding] = found.pop(head)
    return found


def export_tensors(mappings: Sequence[TensorMapping], read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, joined from ours in the order of their rows; ours are read in `export_order`."""
    groups = list(by_theirs(mappings).items())
    while groups:
        name, members = groups.pop(0)
        if members[0].index is None:
            yield name, _joined(members, read)
            continue
        # All matrices of one stack follow one another, so that it is read once.
        stack = read(members[0].ours).detach()
        yield name, stack[members[0].index].contiguous()
        while groups and groups[0][1][0].ours == members[0].ours:
            name, members = groups.pop(0)
            yield name, stack[members[0].index].contiguous()
        del stack


def _joined(members: Sequence[TensorMapping], read: Callable[[str], Tensor]) -> Tensor:
    # A function of its own, so that no local of the generator keeps a tensor alive between two.
    tensor = join(members, [read(mapping.ours) for mapping in members]).detach()
    return (tensor.t() if members[0].transpose else tensor).contiguous()


def join(members: Sequence[TensorMapping], parts: Sequence[Tensor]) -> Tensor:
    """The rows of one of their tensors, from the unrounded ones of its members: the inverse of `TensorMapping.take`."""
    if len(parts) == 1:
        offset = members[0].offset
        return parts[0].double() - offset if offset else parts[0]
    if members[0].stride is None:
        return torch.cat(list(parts), members[0].dim)
    groups = [part.view(-1, mapping.rows or 1, *part.shape[1:]) for mapping, part in zip(members, parts, strict=True)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def export_order(mappings: Sequence[TensorMapping]) -> list[str]:
    """Our names, in the order in which an export reads them."""
    # A stack is read once, for the matrices of it that follow one another.
    members = (mapping for group in by_theirs(mappings).values() for mapping in group)
    return [name for (name, _), _ in groupby(members, lambda each: (each.ours, each.index is not None))]


def by_theirs(mappings: Sequence[TensorMapping]) -> dict[str, list[TensorMapping]]:
    """The mappings of each of their tensors, in the order of its rows."""
    groups: dict[str, list[TensorMapping]] = {}
    for mapping in mappings:
        groups.setdefault(mapping.theirs, []).append(mapping)
    return {name: sorted(members, key=lambda mapping: mapping.start) for name, members in groups.items()}


def read_shared_keys(config: ConfigFile) -> dict[str, Any]:
    """The options that LLaMA, Mistral, Qwen and GLM store under the same keys of config.json."""
    rope = read_rope(config)
    scaling = rope.get("scaling")
    return {
        "vocab_size": config.count("vocab_size"),
        "dim": config.count("hidden_size"),
        "num_layers": config.count("num_hidden_layers", largest=MAX_LAYERS),
        "num_heads": config.count("num_attention_heads"),
        "mlp_dim": config.count("intermediate_size"),
        "rope_theta": rope.get("theta", 10000.0),
        "rope_scaling": None if scaling is None else from_dict(RopeScaling, scaling, "rope_scaling"),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
        "attention_dropout": config.number("attention_dropout", 0.0, below=1.0),
    }


def write_shared_keys(config: Any, rotary_fraction: float | None = None) -> dict[str, Any]:
    """The keys of config.json that LLaMA, Mistral, Qwen and GLM share."""
    scaling = None if config.rope_scaling is None else to_dict(config.rope_scaling)
    return {
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "head_dim": config.head_width,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": write_rope(config.rope_theta, rotary_fraction, scaling),
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": config.attention_dropout,
    }


class GptKeys(dict[str, str]):
    """The keys of config.json of BLOOM, GPT-2 and PanGu-alpha by the options that they hold; three are the same."""

    def __init__(self, **names: str) -> None:
        super().__init__(
            vocab_size="vocab_size", norm_eps="layer_norm_epsilon", tie_embeddings="tie_word_embeddings", **names
        )

    def read(self, config: ConfigFile, max_length: int, dropout: float) -> dict[str, Any]:
        """The options; `max_length` and `dropout` are the defaults of the architecture."""
        rate = partial(config.number, default=dropout, below=1.0)
        readers: dict[str, Callable[[str], Any]] = {
            "num_layers": partial(config.count, largest=MAX_LAYERS),
            "max_length": partial(config.count, default=max_length),
            "mlp_dim": config.optional_count,
            "norm_eps": partial(config.number, default=1e-5, below=1.0),
            "tie_embeddings": partial(config.flag, default=True),
            **dict.fromkeys(("embedding_dropout", "attention_dropout", "residual_dropout"), rate),
        }
        return {option: readers.get(option, config.count)(key) for option, key in self.items()}

    def write(self, config: Any) -> dict[str, Any]:
        """The keys with the values of their options."""
        return {key: getattr(config, option) for option, key in self.items()}


def read_experts(config: ConfigFile, count: str, default: tuple[int, int], normalize: bool = True) -> ExpertsConfig:
    """The experts of config.json; `count` is its key of their number, `default` their number and that of a token."""
    return ExpertsConfig(
        num_experts=config.count(count, default[0]),
        top_k=config.count("num_experts_per_tok", default[1]),
        normalize=normalize,
        balance_weight=config.number("router_aux_loss_coef", 0.001),
    )


def write_experts(experts: ExpertsConfig, count: str) -> dict[str, Any]:
    """The keys of config.json. Raises ModelError for a router that Hugging Face's architectures do not have."""
    plain = ExpertsConfig(num_experts=experts.num_experts, top_k=experts.top_k)
    options = {name: getattr(experts, name) for name in ("scoring", "scale", "num_groups", "num_shared")}
    odd = [f"{name}={value}" for name, value in options.items() if value != getattr(plain, name)]
    odd += ["balance=bias, whose bias it would lose"] if experts.balance == "bias" else []
    if odd:
        message = "no Hugging Face architecture has a router with these options"
        expected = "scores by softmax, no groups, no shared experts, no bias"
        raise ModelError(message, got=", ".join(odd), expected=expected, fix="keep the run folder, which has them")
    return {
        count: experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "router_aux_loss_coef": experts.balance_weight,
    }


def read_rope(config: ConfigFile) -> dict[str, Any]:
    """The RoPE options of config.json in either format: `rope_scaling` with top-level keys, or else `rope_parameters`.

    Returns theta, fraction and scaling (the options of `RopeScaling`, or None), absent keys left out.
    """
    nested = config.group("rope_scaling") or config.group("rope_parameters")
    result: dict[str, Any] = {}
    inner = {name: nested.pop(name, None) for name in ("rope_theta", "partial_rotary_factor")}
    plain = ConfigFile(config | {name: value for name, value in inner.items() if value is not None})
    if plain.get("rope_theta") is not None:
        result["theta"] = plain.number("rope_theta", 0.0, least=1.0, below=1e12)
    if plain.get("partial_rotary_factor") is not None:
        result["fraction"] = plain.number("partial_rotary_factor", 0.0, below=1.0 + 1e-9)
    # A note about the training of a YaRN checkpoint, which changes nothing computed.
    nested.pop("finetuned", None)
    kind = nested.pop("rope_type", None) or nested.get("type") or "default"
    nested.pop("type", None)
    if kind != "default":
        own = nested.pop("original_max_position_embeddings", None)
        original = config.optional_count("original_max_position_embeddings") or own
        options = {SCALING_NAMES.get(name, name): value for name, value in nested.items()}
        result["scaling"] = {"kind": kind, **options} | ({"original_length": original} if original else {})
    return result


# Their names of the options of `RopeScaling`, and the kinds that alone have an option.
SCALING_NAMES = {"low_freq_factor": "low_frequency_factor", "high_freq_factor": "high_frequency_factor"}
_ONLY_KIND = {
    "low_frequency_factor": "llama3",
    "high_frequency_factor": "llama3",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "truncate": "yarn",
}


def write_rope(theta: float, fraction: float | None, scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    """The `rope_parameters` of config.json."""
    result: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if fraction is not None:
        result["partial_rotary_factor"] = fraction
    if scaling is not None:
        names = {ours: theirs for theirs, ours in SCALING_NAMES.items()}
        names |= {"kind": "rope_type", "original_length": "original_max_position_embeddings"}
        for name, value in scaling.items():
            if value is not None and _ONLY_KIND.get(name, scaling["kind"]) == scaling["kind"]:
                result[names.get(name, name)] = value
    return result
