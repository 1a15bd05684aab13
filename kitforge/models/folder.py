"""A model on disk: runs and Hugging Face folders in, Hugging Face folders out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor

from kitforge.core.checkpoint.gather import GatheredParameters
from kitforge.core.checkpoint.hugging_face import read_folder, write_folder
from kitforge.core.checkpoint.load import Checkpoint, check_shapes, find_checkpoint, load_tensors
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.init import initialise, make_real
from kitforge.foundation.dtype import EXPORT_DTYPES, ExportDtype
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import FAMILIES, config_of, family_of_type
from kitforge.models.mapping import export_order, export_tensors, held_shapes, import_tensors


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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model on disk, of the sizes that its files have: its network, and its weights, mapped and read one by one."""

    config: FamilyConfig
    # All weights, by our names; of those in the regions that are given, these parts.
    tensors: Callable[[Mapping[str, Region]], Iterator[tuple[str, Tensor]]]


def load(folder: Path, *, device: torch.device, level: CompileLevel = "O1") -> Decoder:
    """The model of a run folder, a step folder or a Hugging Face folder, in fp32 and whole on the device."""
    stored = open_model(folder)
    model = build(stored.config, device=device, level=level)
    load_tensors(dict(model.named_parameters()), stored.tensors({}), what="model")
    return model


def open_model(folder: Path, open_run: Callable[[Path], Checkpoint | None] = find_checkpoint) -> StoredModel:
    """The model of a run folder, a step folder or a Hugging Face folder; no weight is read and none is given memory.

    `open_run` finds the checkpoint, as ranks do together. Raises ModelError for files of another network than they say.
    """
    if not folder.is_dir():
        raise ModelError("there is no such folder", got=folder, expected="a run, a step or a Hugging Face folder")
    checkpoint = open_run(folder)
    return _open_hugging_face(folder) if checkpoint is None else _open_step(checkpoint)


def _open_step(checkpoint: Checkpoint) -> StoredModel:
    values = checkpoint.state.get("config", {}).get("model")
    if not isinstance(values, Mapping) or "family" not in values:
        raise ModelError(
            "the checkpoint does not say which network it is of",
            got=checkpoint.folder,
            expected="a run of one of the families",
            fix="build your own network and pass it to Trainer, with resume= this folder",
        )
    config, shapes = config_of(values), checkpoint.shapes("model")
    _check_count(config, len(shapes), checkpoint.folder)
    check_shapes(dict(outline(config).named_parameters()), shapes, what="model")
    return StoredModel(config=config, tensors=checkpoint.model)


def _open_hugging_face(folder: Path) -> StoredModel:
    source = read_folder(folder)
    model_type = str(source.config.get("model_type"))
    family = family_of_type(model_type)
    try:
        config = family.read_config(source.config)
    except KeyError as error:
        raise ModelError("config.json lacks a key", got=folder / "config.json", expected=f"the key {error}") from None
    shapes = source.shapes()
    _check_count(config, len(shapes), folder)
    pieces = family.pieces(config, model_type)
    expected = dict(export_tensors(pieces, dict(outline(config).named_parameters())))
    check_shapes(expected, held_shapes(family, pieces, shapes), what=f"{folder / 'config.json'}: the network")
    dtypes = Counter(source.dtype(name) for name in shapes)
    published = next((word for word, dtype in EXPORT_DTYPES.items() if dtypes.most_common(1)[0][0] == dtype), "float32")

    def tensors(regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in import_tensors(family, pieces, source.names(), source.tensor):
            yield name, regions[name].of(tensor) if name in regions else tensor

    # Every family's options are a dataclass with this field.
    return StoredModel(config=replace(cast(Any, config), dtype=published), tensors=tensors)


def _check_count(config: FamilyConfig, num_tensors: int, folder: Path) -> None:
    """A layer has at least one tensor, so that a network of more layers is not even laid out."""
    if config.num_layers > num_tensors:
        raise ModelError(
            f"{folder} does not hold the network that it speaks of",
            got=f"{num_tensors} tensors",
            expected=f"those of {config.num_layers} layers",
        )


def save(
    model: Decoder,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    weights: GatheredParameters | None = None,
    dtype: ExportDtype | None = None,
) -> None:
    """Write the model as a Hugging Face folder, tensor by tensor; `extra` is added to config.json (token ids).

    `weights` are the whole ones where the model itself holds pieces. Without `dtype` they are written in the one that
    they were published in. Raises ModelError for a weight that float16 cannot hold.
    """
    chosen = dtype or model.config.dtype
    config = _written_config(model.config) | {"dtype": chosen} | dict(extra or {})
    pieces = FAMILIES[model.config.family].pieces(model.config, config["model_type"])
    given: Mapping[str, Tensor] = dict(model.named_parameters()) if weights is None else weights
    meta = _without_values(given) if weights is None else weights.outline()
    announced = ((name, each.to(EXPORT_DTYPES[chosen])) for name, each in export_tensors(pieces, meta))
    tensors = ((name, _cast(name, each, chosen)) for name, each in export_tensors(pieces, given))
    write_folder(folder, config, tensors, outline=announced)


def _without_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.empty_like(each, device="meta") for name, each in tensors.items()}


def exported_names(config: FamilyConfig) -> list[str]:
    """The parameters of a network, in the order in which `save` asks for them."""
    return export_order(FAMILIES[config.family].pieces(config, _written_config(config)["model_type"]))


def _written_config(config: FamilyConfig) -> dict[str, Any]:
    return FAMILIES[config.family].write_config(config)


def _cast(name: str, tensor: Tensor, dtype: ExportDtype) -> Tensor:
    result = tensor.to(EXPORT_DTYPES[dtype])
    if dtype == "float16" and bool(result.isinf().any()):
        raise ModelError(
            f"tensor {name!r} has weights that float16 cannot hold", expected="up to 65504", fix="export as bfloat16"
        )
    return result


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder looks like one of Hugging Face's."""
    try:
        return "model_type" in parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
