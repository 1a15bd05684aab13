"""Adapters in folders of PEFT's kind: adapter_config.json beside adapter_model.safetensors.

Layout: https://huggingface.co/docs/peft/developer_guides/checkpoint. A head that was trained beside the factors lies
with them, as PEFT's `modules_to_save` do. Layers that a family keeps apart and its peer
keeps in one matrix (GPT-2's and GLM's queries, keys and values) have no such folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitforge.core.checkpoint.safetensors_file import TensorFile, write
from kitforge.core.nn.decoder import Decoder
from kitforge.core.nn.lora import LoraConfig, adapter_tensors, attach
from kitforge.foundation.errors import ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import converter_of

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX, _SUFFIXES = "base_model.model.", (".lora_A.weight", ".lora_B.weight")
# What PEFT and transformers call the head of a model that gives scores.
_HEAD = "score"
# Options of PEFT's under which the factors mean something else.
_VARIANTS = ("use_dora", "use_rslora", "lora_bias", "rank_pattern", "alpha_pattern")


def save_adapter(
    network: Decoder,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    config: LoraConfig,
    folder: Path,
    base: str | None = None,
    head: Mapping[str, Tensor] | None = None,
) -> None:
    """Write an adapter of the network: both factors of each layer that has it, whole (`adapter_tensors`). `base` says
    where the network itself can be found. `head` holds the tensors of a head that gives scores, by names that begin
    with `score.`."""
    theirs = _names(network)
    tensors = []
    for path, pair in factors.items():
        own = _of_layer(theirs, path)
        tensors += [
            (f"{_PREFIX}{own}{suffix}", each.detach().contiguous())
            for suffix, each in zip(_SUFFIXES, pair, strict=True)
        ]
    targets = sorted({key.removeprefix(_PREFIX).split(".")[-3] for key, _ in tensors})
    tensors += [(f"{_PREFIX}{own}", each.detach().contiguous()) for own, each in (head or {}).items()]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / WEIGHTS, tensors)
    page = {
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
    write_text(folder / CONFIG, json.dumps(page, indent=1))


@torch.no_grad()
def load_adapter(network: Decoder, name: str, folder: Path) -> LoraConfig:
    """Give the network the adapter of a folder. Raises ModelError for one that does not fit or is more than low-rank
    factors beside linear layers; a head is left to `read_head`."""
    page = _read(folder / CONFIG)
    file = TensorFile(folder / WEIGHTS, ModelError)
    theirs = _names(network)
    ours = {other: path for path, other in theirs.items()}
    layers: dict[str, list[str]] = {}
    for key in (each for each in file.names() if not _is_of_head(each)):
        layer = key.removeprefix(_PREFIX)
        suffix = next((each for each in _SUFFIXES if layer.endswith(each)), None)
        if suffix is None or layer.removesuffix(suffix) not in ours:
            raise ModelError("the adapter is of another architecture", got=key, expected="layers of this network")
        layers.setdefault(ours[layer.removesuffix(suffix)], []).append(key)
    targets = tuple(sorted({path.split(".")[-1] for path in layers}))
    config = LoraConfig(rank=int(page["r"]), alpha=float(page["lora_alpha"]), target_modules=targets)
    attach(network, name, config)
    for path, factors in adapter_tensors(network, name).items():
        for suffix, factor in zip(_SUFFIXES, factors, strict=True):
            tensor = file.tensor(f"{_PREFIX}{theirs[path]}{suffix}")
            if tensor.shape != factor.shape:
                raise ModelError(f"the adapter of {path} is of another size", got=tensor.shape, expected=factor.shape)
            factor.copy_(tensor)
    return config


def read_head(folder: Path) -> dict[str, Tensor]:
    """The tensors of the head that lies with the adapter of a folder, by names that begin with `score.`; empty for an
    adapter of a language model."""
    _read(folder / CONFIG)
    file = TensorFile(folder / WEIGHTS, ModelError)
    return {key.removeprefix(_PREFIX): file.tensor(key) for key in file.names() if _is_of_head(key)}


def is_adapter(folder: Path) -> bool:
    """Whether the folder looks like one of PEFT's."""
    return (folder / CONFIG).is_file()


def _is_of_head(key: str) -> bool:
    return key.startswith(f"{_PREFIX}{_HEAD}.")


def _names(network: Decoder) -> dict[str, str]:
    """Their name of each linear layer of ours that is a matrix of its own there."""
    converter = converter_of(network.config)
    model_type = converter.write_config(network.config)["model_type"]
    mappings = [each for each in converter.tensor_mappings(network.config, model_type) if each.ours.endswith(".weight")]
    direct = [each for each in mappings if each.rows is None and not each.transpose]
    return {each.ours.removesuffix(".weight"): each.theirs.removesuffix(".weight") for each in direct}


def _of_layer(names: dict[str, str], path: str) -> str:
    if path not in names:
        raise ModelError(
            "this layer is no matrix of its own in a Hugging Face folder", got=path, expected="a layer of a LLaMA"
        )
    return names[path]


def _read(path: Path) -> dict[str, Any]:
    try:
        page = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is no adapter's configuration", got=error) from None
    unknown = [name for name in _VARIANTS if page.get(name)]
    if page.get("peft_type") != "LORA" or page.get("bias", "none") != "none" or unknown:
        got = ", ".join([str(page.get("peft_type")), f"bias {page.get('bias', 'none')}", *unknown])
        raise ModelError("this is not a plain LoRA adapter", got=got, expected="LORA, bias none, no variant of it")
    return dict(page)
