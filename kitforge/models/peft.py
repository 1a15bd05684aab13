"""LoRA and DoRA adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The head of a reward model is stored with them, as
PEFT's `modules_to_save`.

Some families hold several of our layers in one matrix (query, key and value; gate and up). PEFT's factors of such a
matrix are the same down for each of them and their rows of up. Ours, each with a down of its own, are written as
factors of as many times the rank: the downs one after the other, and up with a block for each layer.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach, merge_factors
from kitforge.core.nn.score_head import HEAD_BIAS, POOLER
from kitforge.foundation.config import check
from kitforge.foundation.errors import ModelError
from kitforge.foundation.files import user_path, write_text
from kitforge.foundation.known_keys import KnownKeys
from kitforge.foundation.log import logger
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import FAMILIES, converter_of, exportable_config
from kitforge.models.classifier_heads import SEQUENCE_CLASSIFIER, TOKEN_CLASSIFIER, head_names, own_name
from kitforge.models.weight_mapping import HEADS, ConfigFile, TensorMapping, by_theirs, join

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
# PEFT re-initializes an adapter when it loads it, before it reads the factors; under other names than these the base
# model is changed with it.
_INITIAL = (True, False, None, "gaussian", "orthogonal")
_KEYS = KnownKeys(
    file=CONFIG,
    refusal="this is not a plain LoRA adapter",
    obeyed=frozenset(
        {
            "alpha_pattern",
            "base_model_name_or_path",
            "exclude_modules",
            "layers_pattern",
            "layers_to_transform",
            "lora_alpha",
            "modules_to_save",
            "r",
            "rank_pattern",
            "target_modules",
            "target_parameters",
            "use_dora",
            "use_rslora",
        }
    ),
    accepted={
        "peft_type": ("LORA",),
        "bias": ("none", None),
        "lora_bias": (False, None),
        "init_lora_weights": _INITIAL,
        "alora_invocation_tokens": (None,),
        "loftq_config": (None, {}),
        "layer_replication": (None, []),
        "trainable_token_indices": (None, [], {}),
        "use_qalora": (False, None),
    },
    # Of the file, of training, and defaults of options that are off.
    unused=frozenset(
        {
            "auto_mapping",
            "ensure_weight_tying",
            "eva_config",
            "fan_in_fan_out",
            "inference_mode",
            "lora_dropout",
            "megatron_core",
            "peft_version",
            "qalora_group_size",
            "revision",
            "runtime_config",
            "task_type",
        }
    ),
    fixes={
        "init_lora_weights": "save it with path_initial_model_for_weight_conversion, which makes it a plain adapter",
        "peft_type": "merge it into its base model with PEFT",
    },
)
_log = logger(__name__)


def save_adapter(
    network: nn.Module,
    factors: Mapping[str, tuple[Tensor, ...]],
    config: LoraConfig,
    folder: Path,
    base: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter of the network: the full factors of each adapted layer (`adapter_tensors`). `base` names the
    base model. `head` holds the tensors of a head by our names. Raises ModelError for DoRA of a layer that
    shares a matrix in Hugging Face's model with one that is not adapted."""
    groups = _groups(exportable_config(network))
    tensors, written, ranks = [], list[str](), dict[str, int]()
    for theirs, members in groups.items():
        found = [factors.get(_path(each)) for each in members]
        if not any(found):
            continue
        merged = _joined(theirs, members, found, config.rank)
        written.append(theirs)
        ranks[theirs] = len(merged[0])
        for suffix, factor in zip(_SUFFIXES, merged, strict=False):
            tensors.append((f"{_PREFIX}{theirs}{suffix}", factor.detach().contiguous()))
    own_config, task = exportable_config(network), _task_type(network, head or {})
    model_type = str(converter_of(own_config).write_config(own_config)["model_type"])
    names = head_names(model_type, TOKEN_CLASSIFIER if task == "TOKEN_CLS" else SEQUENCE_CLASSIFIER)
    names = {own: names.get(own, own) for own in head or {}}
    head_modules = {each.removeprefix(f"{model_type}.").partition(".")[0] for each in names.values()}
    tensors += [(f"{_PREFIX}{names[own]}", each.detach().contiguous()) for own, each in (head or {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / WEIGHTS, tensors)
    targets = {theirs: _target(theirs, set(groups) - set(written)) for theirs in written}
    wider = {targets[theirs]: rank for theirs, rank in ranks.items() if rank != config.rank}
    values = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "rank_pattern": wider,
        "alpha_pattern": {name: config.scale * rank for name, rank in wider.items()},
        "target_modules": sorted(set(targets.values())),
        "modules_to_save": sorted(head_modules) or None,
        "use_dora": config.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(groups[theirs][0].transpose for theirs in written),
        "inference_mode": True,
    }
    write_text(folder / CONFIG, json.dumps(values, indent=1))


def _task_type(network: nn.Module, head: Mapping[str, Tensor]) -> str:
    """PEFT's name of what a network is; the head of a classifier of tokens has a bias of several labels, no pooler."""
    if head:
        bias = head.get(HEAD_BIAS)
        return "SEQ_CLS" if bias is None or bias.numel() == 1 or POOLER in head else "TOKEN_CLS"
    kind = FAMILIES[exportable_config(network).family].kind
    return "SEQ_2_SEQ_LM" if kind == "encoder-decoder" else "CAUSAL_LM"


def _joined(
    theirs: str, members: Sequence[TensorMapping], found: Sequence[tuple[Tensor, ...] | None], rank: int
) -> tuple[Tensor, ...]:
    """The factors of one of their matrices, from those of its members; None for one that is not adapted."""
    adapted = [each for each in found if each is not None]
    magnitudes = [each[2] for each in adapted if len(each) > 2]
    if magnitudes and len(adapted) < len(members):
        names = ", ".join(_path(each).split(".")[-1] for each in members)
        message = f"DoRA of a part of {theirs} has no form in PEFT"
        raise ModelError(message, fix=f"adapt all of {names}, or use lora.kind=lora")
    first = adapted[0]
    if len(adapted) == len(members) and all(torch.equal(each[0], first[0]) for each in adapted):
        downs, ups = [first[0]], [each[1] for each in adapted]
    else:
        downs = [torch.zeros_like(first[0]) if each is None else each[0] for each in found]
        ups = []
        for index, (mapping, each) in enumerate(zip(members, found, strict=True)):
            rows = len(first[1]) if mapping.rows is None or mapping.stride is not None else mapping.rows
            up = first[1].new_zeros(rows, rank * len(members))
            if each is not None:
                up[:, index * rank : (index + 1) * rank] = each[1]
            ups.append(up)
    merged = torch.cat(downs), join(members, ups)
    return (*merged, join(members, magnitudes)) if magnitudes else merged


def _target(theirs: str, others: set[str]) -> str:
    """The end of a layer's name that names it in `target_modules`, and none of the others."""
    parts = theirs.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
    return next(end for end in ends if not any(other.endswith(f".{end}") for other in others))


class _AdapterFolder:
    """An adapter of a network in PEFT's format, by our names of the layers. Raises ModelError for one that is of
    another network, or more than LoRA factors of linear layers and whole layers; a head is left to `read_head`."""

    def __init__(self, config: FamilyConfig, folder: Path) -> None:
        self._values = values = _read_config(folder / CONFIG)
        self._file = TensorFile(folder / WEIGHTS, ModelError)
        file = ConfigFile(values)
        file.name = CONFIG
        self._rank, self._alpha = file.count("r", 8), file.number("lora_alpha", 8.0)
        self._count = 3 if values.get("use_dora") else 2
        groups, skipped = _groups(config), set[str]()
        self._layers: dict[str, tuple[str, int, list[TensorMapping]]] = {}
        self._scales: dict[str, float] = {}  # of the update, by the name of the layer in PEFT
        self._saved = _saved_layers(config, self._file, values)
        saved = {theirs for theirs, _ in self._saved.values()}
        for key in (each for each in self._file.names() if each not in saved):
            if own_name(key.removeprefix(_PREFIX)) is not None:
                continue
            layer = key.removeprefix(_PREFIX)
            suffix = next((each for each in _SUFFIXES if layer.endswith(each)), None)
            theirs = layer.removesuffix(suffix or "")
            if suffix is None or theirs not in groups:
                message = "the adapter is of another architecture, or of embeddings or the head"
                raise ModelError(message, got=key, expected="linear layers of this network")
            if not is_target(values, theirs):
                skipped.add(theirs)
                continue
            self._scales[theirs] = self._scale(*self._rank_and_alpha(theirs))
            members = groups[theirs]
            self._layers |= {_path(each): (theirs, index, members) for index, each in enumerate(members)}
        if skipped:
            _log.warning("%s: factors of %s are unused, as %s does not name them", folder, sorted(skipped)[:5], CONFIG)

    def _rank_and_alpha(self, theirs: str) -> tuple[int, float]:
        rank = _of_pattern(self._values.get("rank_pattern"), theirs, self._rank)
        return int(rank), float(_of_pattern(self._values.get("alpha_pattern"), theirs, self._alpha))

    def _scale(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self._values.get("use_rslora") else rank)

    def uniform(self) -> LoraConfig:
        """The options of the adapter, for training. Raises ModelError for several ranks or scales, and whole layers."""
        self.check_low_rank()
        own = self._scale(self._rank, self._alpha)
        for theirs, _, members in self._layers.values():
            rank, alpha = self._rank_and_alpha(theirs)
            is_scaled = not math.isclose(self._scale(rank, alpha), own)
            if is_scaled or rank not in (self._rank, self._rank * len(members)):
                got = f"rank {rank} and alpha {alpha:g} for {theirs}"
                fix = "name the folder as the checkpoint, which merges it, and train a new adapter on that"
                expected = f"rank {self._rank} and alpha {self._alpha:g} in every layer that is to be trained on"
                raise ModelError("the adapter has several ranks or scales", got=got, expected=expected, fix=fix)
        self._layers = {path: layer for path, layer in self._layers.items() if self._is_adapted(*layer)}
        targets = tuple(sorted({path.split(".")[-1] for path in self._layers}))
        kind: Literal["lora", "dora"] = "dora" if self._count == 3 else "lora"
        return LoraConfig(kind=kind, rank=self._rank, alpha=own * self._rank, target_modules=targets)

    def check_low_rank(self) -> None:
        """Raise ModelError for an adapter that holds whole layers."""
        if self._saved:
            fix = "merge it into its base model, or start from the folder as a checkpoint"
            raise ModelError("the adapter holds whole layers", got=", ".join(sorted(self._saved)[:5]), fix=fix)

    def paths(self) -> set[str]:
        """The adapted layers."""
        return set(self._layers)

    def scale(self, path: str) -> float:
        """The scale of the update of a layer."""
        return self._scales[self._layers[path][0]]

    def saved(self, name: str) -> Tensor | None:
        """A weight of ours that the folder holds as a whole."""
        if name not in self._saved:
            return None
        key, mapping = self._saved[name]
        tensor = self._file.tensor(key)
        return mapping.take(tensor.t() if mapping.transpose else tensor)

    def whole_factors(self, path: str) -> tuple[Tensor, ...]:
        """The factors of a layer as stored, with its rows of those that it shares."""
        theirs, index, members = self._layers[path]
        down, *rows = (self._file.tensor(f"{_PREFIX}{theirs}{suffix}") for suffix in _SUFFIXES[: self._count])
        rank, _ = self._rank_and_alpha(theirs)
        if len(down) != rank:
            message = f"the adapter of {theirs} has another rank than its {CONFIG}"
            raise ModelError(message, got=len(down), expected=rank)
        return (down, *(members[index].take(each) for each in rows))

    def factors(self, path: str) -> tuple[Tensor, ...]:
        """The factors of an adapted layer of a `uniform` adapter, as `adapter_tensors` gives them."""
        theirs, index, _ = self._layers[path]
        down, up, *magnitude = self.whole_factors(path)
        if len(down) != self._rank:
            part = slice(index * self._rank, (index + 1) * self._rank)
            if up.count_nonzero() != up[:, part].count_nonzero():
                message = f"the adapter of {theirs} is of another rank"
                raise ModelError(message, got=len(down), expected=f"{self._rank}, or a block for each layer in it")
            down, up = down[part], up[:, part]
        return (down, up, *magnitude)

    def _is_adapted(self, theirs: str, index: int, _: object) -> bool:
        """Whether the layer has factors: of a matrix of several layers, written by us, some may have none."""
        down = self._file.tensor(f"{_PREFIX}{theirs}{_SUFFIXES[0]}")
        return len(down) == self._rank or bool(down[index * self._rank : (index + 1) * self._rank].any())


@torch.no_grad()
def load_adapter(network: nn.Module, name: str, folder: Path) -> LoraConfig:
    """Attach the adapter of a folder to the network. Raises ModelError for one that does not fit, or that is more than
    LoRA factors of linear layers; a head is left to `read_head`."""
    adapter = _AdapterFolder(exportable_config(network), folder)
    config = adapter.uniform()
    attach(network, name, config)
    for path, factors in adapter_tensors(network, name).items():
        if path not in adapter.paths():
            raise ModelError("the adapter leaves a layer out", got=folder, expected=f"factors of {path}")
        for factor, tensor in zip(factors, adapter.factors(path), strict=True):
            if tensor.shape != factor.shape:
                raise ModelError(f"the adapter of {path} has another shape", got=tensor.shape, expected=factor.shape)
            factor.copy_(tensor)
    return config


def merge_adapter(
    config: FamilyConfig, read: Callable[[str, Region | None], Tensor], folder: Path
) -> Callable[[str, Region | None], Tensor]:
    """The reader of a base model's weights, with the adapter of a folder merged in fp32. Raises ModelError for an
    adapter of another network."""
    adapter = _AdapterFolder(config, folder)

    def merged(name: str, region: Region | None) -> Tensor:
        path = name.removesuffix(".weight")
        if (saved := adapter.saved(name)) is not None:
            return saved if region is None else region.of(saved)
        if path not in adapter.paths() or path == name:
            return read(name, region)
        factors = [factor.float() for factor in adapter.whole_factors(path)]
        weight = read(name, None)
        if (len(factors[1]), factors[0].shape[1]) != tuple(weight.shape):
            got = [len(factors[1]), factors[0].shape[1]]
            raise ModelError(f"the adapter of {path} has another shape", got=got, expected=list(weight.shape))
        weight = merge_factors(weight.float(), factors, adapter.scale(path))
        return weight if region is None else region.of(weight)

    return merged


def read_scaled_factors(network: nn.Module, folder: Path) -> dict[str, tuple[Tensor, ...]]:
    """The factors of each layer that the adapter of a folder, or of a run, changes: down, `up` times the scale, and of
    DoRA the magnitude, in fp32; they may have several ranks and scales. Raises ModelError for an adapter of another
    architecture, and for one that holds more than factors."""
    folder = folder / "adapter" if is_adapter(folder / "adapter") else folder
    adapter = _AdapterFolder(exportable_config(network), folder)
    adapter.check_low_rank()
    if heads := read_head(folder):
        raise ModelError(
            "the adapter is of a model that labels texts", got=sorted(heads), expected="one that writes them"
        )
    found = {}
    for path in adapter.paths():
        down, up, *magnitude = (each.float() for each in adapter.whole_factors(path))
        # Where a matrix holds several layers, the update of one is of a part of the rank.
        used = up.any(0) | bool(magnitude)
        if used.any():
            found[path] = (down[used], up[:, used] * adapter.scale(path), *magnitude)
    return found


def read_factors(config: FamilyConfig, folder: str | Path, wanted: LoraConfig) -> dict[str, tuple[Tensor, ...]]:
    """The factors of every adapted layer of a folder by the layer's name, as `adapter_tensors` gives them. Raises
    ConfigError for an adapter of another rank, scale, kind or of other layers than `wanted`."""
    adapter = _AdapterFolder(config, user_path(folder))
    check_same(adapter.uniform(), wanted)
    return {path: adapter.factors(path) for path in adapter.paths()}


def check_same(found: LoraConfig, wanted: LoraConfig) -> None:
    """Raise ConfigError unless the configuration of a folder's adapter is that of the options."""
    wanted = replace(wanted, target_modules=tuple(sorted(wanted.target_modules)))
    expected = (
        f"kind={found.kind} rank={found.rank} alpha={found.alpha} target_modules={list(found.target_modules)}, "
        "as in its folder"
    )
    check(found == wanted, "lora", wanted, expected)


def base_of(folder: Path) -> str:
    """The base model that an adapter's folder names. Raises ModelError where it names none."""
    base = _read_config(folder / CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        fix = "add base_model_name_or_path, or start from the base model with lora.path=FOLDER"
        raise ModelError(f"{folder / CONFIG} does not name the model that it adapts", got=base, fix=fix)
    return base


def read_head(folder: Path) -> dict[str, Tensor]:
    """The tensors of the head stored with an adapter by our names; empty for an adapter of a language model."""
    _read_config(folder / CONFIG)
    file = TensorFile(folder / WEIGHTS, ModelError)
    found = {key: own_name(key.removeprefix(_PREFIX)) for key in file.names()}
    return {own: file.tensor(key) for key, own in found.items() if own is not None}


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter."""
    return (folder / CONFIG).is_file()


def _groups(config: FamilyConfig) -> dict[str, list[TensorMapping]]:
    """The mappings of our layers that each matrix of Hugging Face's model holds, by the name of its layer."""
    converter = converter_of(config)
    mappings = converter.tensor_mappings(config, converter.write_config(config)["model_type"])
    weights = [each for each in mappings if each.ours.endswith(".weight") and each.theirs.endswith(".weight")]
    return {theirs.removesuffix(".weight"): members for theirs, members in by_theirs(weights).items()}


def _path(mapping: TensorMapping) -> str:
    """Our name of the layer."""
    return mapping.ours.removesuffix(".weight")


def _of_pattern(pattern: Any, theirs: str, default: float) -> float:
    """The number of a layer in `rank_pattern` or `alpha_pattern`, whose keys are regular expressions for the end of a
    name; the first that matches counts."""
    for key, number in (pattern if isinstance(pattern, dict) else {}).items():
        if _matches(re.match, rf"(.*\.)?({key})$", theirs):
            return float(number)
    return default


def is_target(values: Mapping[str, Any], theirs: str) -> bool:
    """Whether the configuration of an adapter names a layer, by PEFT's rules: a text is a regular expression for the
    whole name, a list has the ends of names."""
    excluded, targets = values.get("exclude_modules"), values.get("target_modules")
    saved = values.get("modules_to_save") or ()
    if (excluded and _is_named(excluded, theirs)) or any(
        _matches(re.match, rf"(^|.*\.){each}($|\..*)", theirs) for each in saved
    ):
        return False
    weight = f"{theirs}.weight"
    if any(weight == each or weight.endswith(f".{each}") for each in values.get("target_parameters") or ()):
        return True
    if targets is None or targets == "all-linear":
        return True
    if isinstance(targets, str) or theirs in targets:
        return _is_named(targets, theirs)
    return _is_named(targets, theirs) and _is_layer(values, theirs)


def _is_named(names: Any, theirs: str) -> bool:
    if isinstance(names, str):
        return _matches(re.fullmatch, names, theirs)
    return any(theirs == each or theirs.endswith(f".{each}") for each in names)


def _is_layer(values: Mapping[str, Any], theirs: str) -> bool:
    """Whether the number of a layer's block is one of `layers_to_transform`."""
    layers, patterns = values.get("layers_to_transform"), values.get("layers_pattern") or (r"[^.]*",)
    if layers is None or layers == []:
        return True
    prefix = r".*?\." if patterns == (r"[^.]*",) else r"(?:^|.*?\.)"
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"{prefix}{pattern}\.(?P<index>\d+)\.", theirs)
        if found is not None:
            return int(found["index"]) in (layers if isinstance(layers, list) else [layers])
    return False


def _matches(match: Callable[[str, str], object], pattern: str, name: str) -> bool:
    try:
        return match(pattern, name) is not None
    except re.error as error:
        expected = "a regular expression"
        raise ModelError(
            f"{CONFIG}: a pattern cannot be read", got=f"{pattern!r}: {error}", expected=expected
        ) from None


def _saved_layers(
    config: FamilyConfig, file: TensorFile, values: Mapping[str, Any]
) -> dict[str, tuple[str, TensorMapping]]:
    """The weights of ours that an adapter's folder holds as a whole (`modules_to_save`), with its name and mapping."""
    if not values.get("modules_to_save"):
        return {}
    converter, held = converter_of(config), set(file.names())
    mappings = converter.tensor_mappings(config, converter.write_config(config)["model_type"])
    found = {each.ours: (f"{_PREFIX}{each.theirs}", each) for each in mappings if f"{_PREFIX}{each.theirs}" in held}
    is_tied = bool(getattr(config, "tie_embeddings", False))
    if is_tied and ("embedding.weight" in found or any(f"{_PREFIX}{name}" in held for name in HEADS)):
        got = f"modules_to_save={values['modules_to_save']}"
        expected = "layers other than embeddings that are the head too"
        raise ModelError(f"{CONFIG}: the adapter unties the embeddings", got=got, expected=expected)
    return found


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not the configuration of an adapter", got=error) from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} is not the configuration of an adapter", got=type(values).__name__)
    _KEYS.check({"peft_type": None, **values}, ModelError)
    return values
