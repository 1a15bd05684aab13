"""LoRA and DoRA adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The head of a reward model is stored with them, as
PEFT's `modules_to_save`.

Some families hold several of our layers in one matrix (query, key and value; gate and up). PEFT's factors of such a
matrix are the same down for each of them and their rows of up. Ours, each with a down of its own, are written as
factors of as many times the rank: the downs one after the other, and up with a block for each layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach, merge_factors
from kitforge.foundation.config import check
from kitforge.foundation.errors import ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import FAMILIES, converter_of, exportable_config
from kitforge.models.weight_mapping import TensorMapping, by_theirs, join

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
# The name of a reward model's head in PEFT and transformers.
_HEAD = "score"
# Options of PEFT that change what the factors mean.
_VARIANTS = ("use_rslora", "lora_bias")


def save_adapter(
    network: nn.Module,
    factors: Mapping[str, tuple[Tensor, ...]],
    config: LoraConfig,
    folder: Path,
    base: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter of the network: the full factors of each adapted layer (`adapter_tensors`). `base` names the
    base model. `head` holds the tensors of a reward head, `score.<name>`. Raises ModelError for DoRA of a layer that
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
    tensors += [(f"{_PREFIX}{own}", each.detach().contiguous()) for own, each in (head or {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / WEIGHTS, tensors)
    names = {theirs: _target(theirs, set(groups) - set(written)) for theirs in written}
    wider = {names[theirs]: rank for theirs, rank in ranks.items() if rank != config.rank}
    values = {
        "peft_type": "LORA",
        "task_type": _task_type(network, head or {}),
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "rank_pattern": wider,
        "alpha_pattern": {name: config.scale * rank for name, rank in wider.items()},
        "target_modules": sorted(set(names.values())),
        "modules_to_save": [_HEAD] if head else None,
        "use_dora": config.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(groups[theirs][0].transpose for theirs in written),
        "inference_mode": True,
    }
    write_text(folder / CONFIG, json.dumps(values, indent=1))


def _task_type(network: nn.Module, head: Mapping[str, Tensor]) -> str:
    """PEFT's name of what a network is; the head of a classifier of tokens has a bias of several labels."""
    if head:
        bias = head.get(f"{_HEAD}.bias")
        return "SEQ_CLS" if bias is None or bias.numel() == 1 else "TOKEN_CLS"
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


@final
class _AdapterFolder:
    """An adapter of a network in PEFT's format, by our names of the layers. Raises ModelError for one that is of
    another network, or more than LoRA factors of linear layers; a head is left to `read_head`."""

    def __init__(self, config: FamilyConfig, folder: Path) -> None:
        values = _read_config(folder / CONFIG)
        self._file = TensorFile(folder / WEIGHTS, ModelError)
        self._rank, alpha = int(values["r"]), float(values["lora_alpha"])
        groups = _groups(config)
        self._layers: dict[str, tuple[str, int, list[TensorMapping]]] = {}
        for key in (each for each in self._file.names() if not _is_head(each)):
            layer = key.removeprefix(_PREFIX)
            suffix = next((each for each in _SUFFIXES if layer.endswith(each)), None)
            theirs = layer.removesuffix(suffix or "")
            if suffix is None or theirs not in groups:
                raise ModelError("the adapter is of another architecture", got=key, expected="layers of this network")
            rank = _of_pattern(values.get("rank_pattern"), theirs, self._rank)
            is_scaled = _of_pattern(values.get("alpha_pattern"), theirs, alpha) * self._rank != alpha * rank
            members = groups[theirs]
            if is_scaled or rank not in (self._rank, self._rank * len(members)):
                got = f"rank {rank} for {theirs}"
                raise ModelError("the adapter has several ranks or scales", got=got, expected=f"rank {self._rank}")
            self._layers |= {_path(each): (theirs, index, members) for index, each in enumerate(members)}
        self._layers = {path: layer for path, layer in self._layers.items() if self._is_adapted(*layer)}
        targets = tuple(sorted({path.split(".")[-1] for path in self._layers}))
        kind: Literal["lora", "dora"] = "dora" if values.get("use_dora") else "lora"
        self._count = 3 if kind == "dora" else 2
        self.config = LoraConfig(kind=kind, rank=self._rank, alpha=alpha, target_modules=targets)

    def paths(self) -> set[str]:
        """The adapted layers."""
        return set(self._layers)

    def factors(self, path: str) -> tuple[Tensor, ...]:
        """The factors of an adapted layer, as `adapter_tensors` gives them."""
        theirs, index, members = self._layers[path]
        down, *rows = (self._file.tensor(f"{_PREFIX}{theirs}{suffix}") for suffix in _SUFFIXES[: self._count])
        up, *magnitude = (members[index].take(each) for each in rows)
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
    attach(network, name, adapter.config)
    for path, factors in adapter_tensors(network, name).items():
        if path not in adapter.paths():
            raise ModelError("the adapter leaves a layer out", got=folder, expected=f"factors of {path}")
        for factor, tensor in zip(factors, adapter.factors(path), strict=True):
            if tensor.shape != factor.shape:
                raise ModelError(f"the adapter of {path} has another shape", got=tensor.shape, expected=factor.shape)
            factor.copy_(tensor)
    return adapter.config


def merge_adapter(
    config: FamilyConfig, read: Callable[[str, Region | None], Tensor], folder: Path
) -> Callable[[str, Region | None], Tensor]:
    """The reader of a base model's weights, with the adapter of a folder merged in fp32. Raises ModelError for an
    adapter of another network."""
    adapter = _AdapterFolder(config, folder)

    def merged(name: str, region: Region | None) -> Tensor:
        path = name.removesuffix(".weight")
        if path not in adapter.paths() or path == name:
            return read(name, region)
        factors = [factor.float() for factor in adapter.factors(path)]
        weight = read(name, None)
        if (len(factors[1]), factors[0].shape[1]) != tuple(weight.shape):
            got = [len(factors[1]), factors[0].shape[1]]
            raise ModelError(f"the adapter of {path} has another shape", got=got, expected=list(weight.shape))
        weight = merge_factors(weight.float(), factors, adapter.config.scale)
        return weight if region is None else region.of(weight)

    return merged


def read_factors(config: FamilyConfig, folder: str | Path, wanted: LoraConfig) -> dict[str, tuple[Tensor, ...]]:
    """The factors of every adapted layer of a folder by the layer's name, as `adapter_tensors` gives them. Raises
    ConfigError for an adapter of another rank, scale, kind or of other layers than `wanted`."""
    adapter = _AdapterFolder(config, Path(folder).expanduser())
    check_same(adapter.config, wanted)
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
    """The tensors of the reward head stored with an adapter, `score.<name>`; empty for an adapter of a language
    model."""
    _read_config(folder / CONFIG)
    file = TensorFile(folder / WEIGHTS, ModelError)
    return {key.removeprefix(_PREFIX): file.tensor(key) for key in file.names() if _is_head(key)}


def is_adapter(folder: Path) -> bool:
    """Whether the folder holds a PEFT adapter."""
    return (folder / CONFIG).is_file()


def _is_head(key: str) -> bool:
    return key.startswith(f"{_PREFIX}{_HEAD}.")


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
    """The number of a layer in `rank_pattern` or `alpha_pattern`, whose keys are the ends of names."""
    for key, number in (pattern if isinstance(pattern, dict) else {}).items():
        if theirs == key or theirs.endswith(f".{key}"):
            return float(number)
    return default


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not the configuration of an adapter", got=error) from None
    unknown = [name for name in _VARIANTS if values.get(name)]
    if values.get("peft_type") != "LORA" or values.get("bias", "none") != "none" or unknown:
        got = ", ".join([str(values.get("peft_type")), f"bias {values.get('bias', 'none')}", *unknown])
        expected = "LORA, with use_dora or without, bias none, no other variant"
        raise ModelError("this is not a plain LoRA adapter", got=got, expected=expected)
    return dict(values)
