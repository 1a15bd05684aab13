"""LoRA and DoRA adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The head of a reward model is stored with them, as
PEFT's `modules_to_save`. GPT-2 and GLM hold queries, keys and values in one matrix, which we keep as three, so adapters
of these layers cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

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
from kitforge.models.catalog import converter_of, exportable_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
# The name of a reward model's head in PEFT and transformers.
_HEAD = "score"
# Options of PEFT that change what the factors mean.
_VARIANTS = ("use_rslora", "lora_bias", "rank_pattern", "alpha_pattern")


def save_adapter(
    network: nn.Module,
    factors: Mapping[str, tuple[Tensor, ...]],
    config: LoraConfig,
    folder: Path,
    base: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter of the network: the full factors of each adapted layer (`adapter_tensors`). `base` names the
    base model. `head` holds the tensors of a reward head, `score.<name>`."""
    names = _layer_names(exportable_config(network))
    tensors = []
    for path, pair in factors.items():
        if path not in names:
            message = "this layer has no matrix of its own in a Hugging Face folder"
            raise ModelError(message, got=path, expected="a layer of a LLaMA")
        for suffix, factor in zip(_SUFFIXES, pair, strict=False):
            tensors.append((f"{_PREFIX}{names[path]}{suffix}", factor.detach().contiguous()))
    targets = sorted({names[path].split(".")[-1] for path in factors})
    tensors += [(f"{_PREFIX}{own}", each.detach().contiguous()) for own, each in (head or {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / WEIGHTS, tensors)
    values = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": targets,
        "modules_to_save": [_HEAD] if head else None,
        "use_dora": config.kind == "dora",
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_text(folder / CONFIG, json.dumps(values, indent=1))


@torch.no_grad()
def load_adapter(network: nn.Module, name: str, folder: Path) -> LoraConfig:
    """Attach the adapter of a folder to the network. Raises ModelError for one that does not fit, or that is more than
    LoRA factors of linear layers; a head is left to `read_head`."""
    config, paths = _read_adapter(exportable_config(network), folder)
    attach(network, name, config)
    theirs, file = _layer_names(exportable_config(network)), TensorFile(folder / WEIGHTS, ModelError)
    for path, factors in adapter_tensors(network, name).items():
        if path not in paths:
            raise ModelError("the adapter leaves a layer out", got=folder, expected=f"factors of {theirs[path]}")
        for suffix, factor in zip(_SUFFIXES, factors, strict=False):
            tensor = file.tensor(f"{_PREFIX}{theirs[path]}{suffix}")
            if tensor.shape != factor.shape:
                raise ModelError(f"the adapter of {path} has another shape", got=tensor.shape, expected=factor.shape)
            factor.copy_(tensor)
    return config


def merge_adapter(
    config: FamilyConfig, read: Callable[[str, Region | None], Tensor], folder: Path
) -> Callable[[str, Region | None], Tensor]:
    """The reader of a base model's weights, with the adapter of a folder merged in fp32. Raises ModelError for an
    adapter of another network."""
    adapter, paths = _read_adapter(config, folder)
    theirs, file = _layer_names(config), TensorFile(folder / WEIGHTS, ModelError)
    count = 3 if adapter.kind == "dora" else 2

    def merged(name: str, region: Region | None) -> Tensor:
        path = name.removesuffix(".weight")
        if path not in paths or path == name:
            return read(name, region)
        factors = [file.tensor(f"{_PREFIX}{theirs[path]}{suffix}").float() for suffix in _SUFFIXES[:count]]
        weight = read(name, None)
        if (len(factors[1]), factors[0].shape[1]) != tuple(weight.shape):
            got = [len(factors[1]), factors[0].shape[1]]
            raise ModelError(f"the adapter of {path} has another shape", got=got, expected=list(weight.shape))
        weight = merge_factors(weight.float(), factors, adapter.scale)
        return weight if region is None else region.of(weight)

    return merged


def read_factors(config: FamilyConfig, folder: str | Path, wanted: LoraConfig) -> dict[str, tuple[Tensor, ...]]:
    """The factors of every adapted layer of a folder by the layer's name, as `adapter_tensors` gives them. Raises
    ConfigError for an adapter of another rank, scale, kind or of other layers than `wanted`."""
    folder = Path(folder).expanduser()
    found, paths = _read_adapter(config, folder)
    check_same(found, wanted)
    theirs, file = _layer_names(config), TensorFile(folder / WEIGHTS, ModelError)
    suffixes = _SUFFIXES[: 3 if found.kind == "dora" else 2]
    return {path: tuple(file.tensor(f"{_PREFIX}{theirs[path]}{suffix}") for suffix in suffixes) for path in paths}


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


def _read_adapter(config: FamilyConfig, folder: Path) -> tuple[LoraConfig, set[str]]:
    """The configuration of a folder's adapter, and our names of the layers that it has factors of."""
    values, file = _read_config(folder / CONFIG), TensorFile(folder / WEIGHTS, ModelError)
    ours = {other: path for path, other in _layer_names(config).items()}
    paths: set[str] = set()
    for key in (each for each in file.names() if not _is_head(each)):
        layer = key.removeprefix(_PREFIX)
        suffix = next((each for each in _SUFFIXES if layer.endswith(each)), None)
        if suffix is None or layer.removesuffix(suffix) not in ours:
            raise ModelError("the adapter is of another architecture", got=key, expected="layers of this network")
        paths.add(ours[layer.removesuffix(suffix)])
    targets = tuple(sorted({path.split(".")[-1] for path in paths}))
    kind: Literal["lora", "dora"] = "dora" if values.get("use_dora") else "lora"
    rank, alpha = int(values["r"]), float(values["lora_alpha"])
    return LoraConfig(kind=kind, rank=rank, alpha=alpha, target_modules=targets), paths


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


def _layer_names(config: FamilyConfig) -> dict[str, str]:
    """Their name of each of our linear layers that is a matrix of its own in Hugging Face's model."""
    converter = converter_of(config)
    mappings = converter.tensor_mappings(config, converter.write_config(config)["model_type"])
    return {
        each.ours.removesuffix(".weight"): each.theirs.removesuffix(".weight")
        for each in mappings
        if each.ours.endswith(".weight") and each.rows is None and not each.transpose
    }


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
