"""LoRA adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. The head of a reward model is stored with them, as
PEFT's `modules_to_save`. GPT-2 and GLM hold queries, keys and values in one matrix, which we keep as three, so adapters
of these layers cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach
from kitforge.foundation.errors import ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import converter_of
from kitforge.models.loading import exportable_config

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# The name of a reward model's head in PEFT and transformers.
_HEAD = "score"
# Options of PEFT that change what the factors mean.
_VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern")


def save_adapter(
    network: nn.Module,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    config: LoraConfig,
    folder: Path,
    base: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter of the network: both full factors of each adapted layer (`adapter_tensors`). `base` names the
    base model. `head` holds the tensors of a reward head, `score.<name>`."""
    names = _layer_names(network)
    tensors = []
    for path, pair in factors.items():
        if path not in names:
            message = "this layer has no matrix of its own in a Hugging Face folder"
            raise ModelError(message, got=path, expected="a layer of a LLaMA")
        for suffix, factor in zip(_SUFFIXES, pair, strict=True):
            tensors.append((f"{_PREFIX}{names[path]}{suffix}", factor.detach().contiguous()))
    targets = sorted({key.removeprefix(_PREFIX).split(".")[-3] for key, _ in tensors})
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
    values = _read_config(folder / CONFIG)
    file = TensorFile(folder / WEIGHTS, ModelError)
    theirs = _layer_names(network)
    ours = {other: path for path, other in theirs.items()}
    paths: set[str] = set()
    for key in (each for each in file.names() if not _is_head(each)):
        layer = key.removeprefix(_PREFIX)
        suffix = next((each for each in _SUFFIXES if layer.endswith(each)), None)
        if suffix is None or layer.removesuffix(suffix) not in ours:
            raise ModelError("the adapter is of another architecture", got=key, expected="layers of this network")
        paths.add(ours[layer.removesuffix(suffix)])
    targets = tuple(sorted({path.split(".")[-1] for path in paths}))
    config = LoraConfig(rank=int(values["r"]), alpha=float(values["lora_alpha"]), target_modules=targets)
    attach(network, name, config)
    for path, factors in adapter_tensors(network, name).items():
        for suffix, factor in zip(_SUFFIXES, factors, strict=True):
            tensor = file.tensor(f"{_PREFIX}{theirs[path]}{suffix}")
            if tensor.shape != factor.shape:
                raise ModelError(f"the adapter of {path} has another shape", got=tensor.shape, expected=factor.shape)
            factor.copy_(tensor)
    return config


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


def _layer_names(network: nn.Module) -> dict[str, str]:
    """Their name of each of our linear layers that is a matrix of its own in Hugging Face's model."""
    config = exportable_config(network)
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
        raise ModelError("this is not a plain LoRA adapter", got=got, expected="LORA, bias none, no variant of it")
    return dict(values)
