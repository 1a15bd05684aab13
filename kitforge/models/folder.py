"""A model on disk: runs and Hugging Face folders in, Hugging Face folders out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import read_folder, write_folder
from kitforge.core.checkpoint.layout import step_folder
from kitforge.core.checkpoint.load import Checkpoint, load_tensors, newest, open_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.init import initialise, make_real
from kitforge.foundation.errors import ModelError
from kitforge.foundation.log import logger
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import FAMILIES, config_of, family_of_type
from kitforge.models.mapping import export_tensors, import_tensors

_log = logger(__name__)


def build(
    config: FamilyConfig, *, device: torch.device, level: CompileLevel = "O1", seed: int | None = None
) -> Decoder:
    """A decoder on the device: laid out on meta, made real, then filled with initial weights under `seed`.

    Without a seed the weights hold no values; whoever asked for that loads them next.
    """
    model = outline(config, level)
    make_real(model, device)
    if seed is not None:
        initialise(model.named_parameters(), model.geometry.num_layers, seed)
    return model


def outline(config: FamilyConfig, level: CompileLevel = "O1") -> Decoder:
    """A decoder on the meta device: shapes without memory."""
    with torch.device("meta"):
        return Decoder(config, select(level))


def load(folder: Path, *, device: torch.device, level: CompileLevel = "O1") -> Decoder:
    """The model of a run folder, a step folder or a Hugging Face folder, in fp32."""
    if not folder.is_dir():
        raise ModelError("there is no such folder", got=folder, expected="a run, a step or a Hugging Face folder")
    checkpoint = find_checkpoint(folder)
    return _load_hugging_face(folder, device, level) if checkpoint is None else _load_step(checkpoint, device, level)


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a run folder (its newest good one, or the best of a run that stopped early) or of a step
    folder; None for any other folder."""
    if (folder / "manifest.json").exists():
        return open_checkpoint(folder)
    if not (folder / "checkpoints").is_dir():
        return None
    found = newest(folder / "checkpoints", on_damaged=lambda error: _log.warning("%s", error))
    if found is None:
        raise ModelError("the run has no checkpoint", got=folder, fix="train it first, or name another folder")
    result = found.state["training"]["result_step"]
    return found if result in (None, found.step) else open_checkpoint(step_folder(folder / "checkpoints", result))


def _load_step(checkpoint: Checkpoint, device: torch.device, level: CompileLevel) -> Decoder:
    values = checkpoint.state.get("config", {}).get("model")
    if not isinstance(values, Mapping) or "family" not in values:
        raise ModelError(
            "the checkpoint does not say which network it is of",
            got=checkpoint.folder,
            expected="a run of one of the families",
            fix="build your own network and pass it to Trainer, with resume= this folder",
        )
    model = build(config_of(values), device=device, level=level)
    load_tensors(dict(model.named_parameters()), checkpoint.model(), what="model")
    return model


def _load_hugging_face(folder: Path, device: torch.device, level: CompileLevel) -> Decoder:
    source = read_folder(folder)
    model_type = str(source.config.get("model_type"))
    family = family_of_type(model_type)
    try:
        config = family.read_config(source.config)
    except KeyError as error:
        raise ModelError("config.json lacks a key", got=folder / "config.json", expected=f"the key {error}") from None
    model = build(config, device=device, level=level)
    tensors = import_tensors(family, family.pieces(config, model_type), source.names(), source.tensor)
    load_tensors(dict(model.named_parameters()), tensors, what="model")
    return model


def save(
    model: Decoder,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
) -> None:
    """Write the model as a Hugging Face folder; `extra` is added to config.json (token ids). `tensors` are the whole
    weights where the model itself holds pieces."""
    family = FAMILIES[model.config.family]
    config = family.write_config(model.config) | {"dtype": "float32"} | dict(extra or {})
    pieces = family.pieces(model.config, config["model_type"])
    write_folder(folder, config, export_tensors(pieces, dict(model.named_parameters()) if tensors is None else tensors))


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder looks like one of Hugging Face's."""
    try:
        return "model_type" in parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
