"""A model on disk: runs and Hugging Face folders in, Hugging Face folders out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor

from kitforge.core.checkpoint.hugging_face import CONFIG, read_folder, write_folder
from kitforge.core.checkpoint.load import Checkpoint, check_shapes, find_checkpoint, load_tensors
from kitforge.core.kernels.dispatch import CompileLevel, select
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.init import init_weights, materialize
from kitforge.foundation.dtype import EXPORT_DTYPES, ExportDtype
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import FAMILIES, config_of, converter_of, converter_of_type
from kitforge.models.weight_mapping import HEADS, export_order, export_tensors, held_shapes, import_tensors


def build(
    config: FamilyConfig, *, device: torch.device, level: CompileLevel = "O1", seed: int | None = None
) -> Decoder:
    """A decoder on the device: laid out on meta, made real, then filled with initial weights under `seed`.

    Without a seed the weights hold no values; whoever asked for that loads them next.
    """
    model = build_on_meta(config, level)
    materialize(model, device)
    if seed is not None:
        init_weights(model.named_parameters(), model.geometry.num_layers, seed)
    return model


def build_on_meta(config: FamilyConfig, level: CompileLevel = "O1") -> Decoder:
    """A decoder on the meta device: shapes without memory."""
    with torch.device("meta"):
        return cast(Decoder, FAMILIES[config.family].build(config, select(level)))


# What transformers calls models that give scores, and their head.
_SCORE_MODEL_SUFFIX, _HEAD = "ForSequenceClassification", "score.weight"
# Further numbers of a head of ours, after `score_` in config.json, which transformers passes over.
SCORE_KEYS = ("bias", "mean", "deviation")
# Finds the checkpoint of a folder, as ranks do together; None where there is none.
OpenCheckpoint: TypeAlias = Callable[[Path], Checkpoint | None]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model on disk, of the sizes that its files have: its network, and its weights, mapped and read one by one."""

    config: FamilyConfig
    names: tuple[str, ...]  # of all weights, ours
    # The weight of that name, or the part of it that the region is; in the dtype in which it is stored.
    read: Callable[[str, Region | None], Tensor]
    # Of a model that gives scores the head that does, `score.weight` [1, dim] and what else there is by such names.
    head: Mapping[str, Tensor] = field(default_factory=dict)
    pad_id: int | None = None  # a token after the text whose scores do not count; None: all count

    def tensors(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor]]:
        """All weights; of those in the regions that are given, these parts."""
        return ((name, self.read(name, regions.get(name))) for name in self.names)


@final
class _ExportedTensors(Mapping[str, Tensor]):
    """The weights of a stored model in one dtype, each read when it is asked for."""

    def __init__(self, stored: StoredModel, dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._stored.read(name, None)
        if not tensor.is_floating_point():
            raise ModelError(
                f"tensor {name!r} holds no weights of a network", got=tensor.dtype, expected="floating point"
            )
        return tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.names)

    def __len__(self) -> int:
        return len(self._stored.names)


def load(folder: Path, *, device: torch.device, level: CompileLevel = "O1") -> Decoder:
    """The model of a run folder, a step folder or a Hugging Face folder, in fp32 and whole on the device."""
    return load_stored(open_model(folder), device=device, level=level)


def load_stored(stored: StoredModel, *, device: torch.device, level: CompileLevel = "O1") -> Decoder:
    """A stored model in fp32 and whole on the device."""
    model = build(stored.config, device=device, level=level)
    load_tensors(dict(model.named_parameters()), stored.tensors({}), what="model")
    return model


def open_model(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The model of a run folder, a step folder or a Hugging Face folder; no weight is read and none is given memory.
    Raises ModelError for files of another network than they say."""
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
    check_count(config, len(shapes), checkpoint.folder)
    check_shapes(dict(build_on_meta(config).named_parameters()), shapes, what="model")

    def read(name: str, region: Region | None) -> Tensor:
        return checkpoint.tensor(name) if region is None else checkpoint.read(name, region)

    return StoredModel(config=config, names=tuple(shapes), read=read)


def is_reward_model(folder: Path) -> bool:
    """Whether the folder is one of Hugging Face's, of a model that gives scores (`*ForSequenceClassification`)."""
    try:
        architectures = parse_json((folder / CONFIG).read_bytes()).get("architectures")
    except (OSError, ValueError, AttributeError):
        return False
    names = architectures if isinstance(architectures, list) else []
    return any(isinstance(each, str) and each.endswith(_SCORE_MODEL_SUFFIX) for each in names)


def open_reward_model(folder: Path) -> StoredModel:
    """The network and the head of a Hugging Face folder of a model that gives one score; no weight is read yet. Raises
    ModelError for one that gives several."""
    source = read_folder(folder)
    shape = source.shapes().get(_HEAD)
    if shape is None or shape[0] != 1:
        raise ModelError(
            f"{folder} does not hold a reward model",
            got="no score.weight" if shape is None else f"{shape[0]} scores a text",
            expected="one score a text (num_labels=1)",
        )
    # Nothing multiplies with a language model's head, so there is none.
    stored = _open_hugging_face(folder, {"tie_word_embeddings": True}, (_HEAD, "score.bias", *HEADS))
    head = {name: source.tensor(name) for name in (_HEAD, "score.bias") if name in source.shapes()}
    ours = {name: source.config.get(f"score_{name}") for name in SCORE_KEYS}
    numbers = {f"score.{name}": torch.tensor(value) for name, value in ours.items() if isinstance(value, (int, float))}
    pad_id = source.config.get("pad_token_id")
    return replace(stored, head=numbers | head, pad_id=pad_id if isinstance(pad_id, int) else None)


def _open_hugging_face(
    folder: Path, changes: Mapping[str, Any] = MappingProxyType({}), left_out: tuple[str, ...] = ()
) -> StoredModel:
    """The language model of a folder, with changes to its config.json, and without the tensors that are left out."""
    source = read_folder(folder)
    model_type = str(source.config.get("model_type"))
    converter = converter_of_type(model_type)
    try:
        config = converter.read_config({**source.config, **changes})
    except KeyError as error:
        raise ModelError("config.json lacks a key", got=folder / "config.json", expected=f"the key {error}") from None
    shapes = {name: shape for name, shape in source.shapes().items() if name not in left_out}
    check_count(config, len(shapes), folder)
    mappings = converter.tensor_mappings(config, model_type)
    expected = dict(export_tensors(mappings, dict(build_on_meta(config).named_parameters())))
    check_shapes(expected, held_shapes(converter, mappings, shapes), what=f"{folder / 'config.json'}: the network")
    dtypes = Counter(source.dtype(name) for name in shapes)
    published = next((word for word, dtype in EXPORT_DTYPES.items() if dtypes.most_common(1)[0][0] == dtype), "float32")

    @cache
    def mapped() -> dict[str, Tensor]:
        """All weights, which are views of the files and take no memory."""
        return dict(import_tensors(converter, mappings, shapes, source.tensor))

    def read(name: str, region: Region | None) -> Tensor:
        return mapped()[name] if region is None else region.of(mapped()[name])

    names = tuple(mapping.ours for mapping in mappings)
    # Every family's options are a dataclass with this field.
    return StoredModel(config=replace(cast(Any, config), dtype=published), names=names, read=read)


def check_count(config: FamilyConfig, num_tensors: int, folder: Path) -> None:
    """Raise ModelError for more layers than tensors: each has at least one, and such a network is not even laid out."""
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
    weights: Mapping[str, Tensor] | None = None,
    dtype: ExportDtype | None = None,
) -> None:
    """Write the model as a Hugging Face folder, tensor by tensor; `extra` is added to config.json (token ids).

    `weights` are the whole ones where the model itself holds pieces. Without `dtype` they are written in the one that
    they were published in. Raises ModelError for a weight that float16 cannot hold.
    """
    given = dict(model.named_parameters()) if weights is None else weights
    _write(model.config, given, folder, extra, dtype or model.config.dtype)


def export(
    stored: StoredModel, folder: Path, *, extra: Mapping[str, Any] | None = None, dtype: ExportDtype | None = None
) -> None:
    """`save` of a model on disk, from file to file: one tensor at a time is in memory, in the dtype of the export. One
    that gives scores becomes a `*ForSequenceClassification`, whose heads have no bias: ours stands in config.json, with
    mean and deviation of the scores."""
    chosen = dtype or stored.config.dtype
    if not stored.head:
        _write(stored.config, _ExportedTensors(stored, EXPORT_DTYPES[chosen]), folder, extra, chosen)
        return
    # Every family's options are a dataclass with this field.
    config = replace(cast(Any, stored.config), tie_embeddings=True)
    own = {
        f"score_{name}": float(stored.head[f"score.{name}"]) for name in SCORE_KEYS if f"score.{name}" in stored.head
    }
    page = own | {
        "architectures": [_sequence_classification_name(config)],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    weights = _ExportedTensors(replace(stored, config=config), EXPORT_DTYPES[chosen])
    _write(config, weights, folder, {**(extra or {}), **page}, chosen, stored.head[_HEAD])


def _sequence_classification_name(config: FamilyConfig) -> str:
    """What transformers calls the model that gives scores. Raises ModelError for a family that it has none of."""
    (name,) = converter_of(config).write_config(config)["architectures"]
    base_name = next((name.removesuffix(end) for end in ("ForCausalLM", "LMHeadModel") if name.endswith(end)), None)
    if base_name is None:
        raise ModelError("Hugging Face has no such model that gives scores", got=name, expected="a *ForCausalLM")
    return f"{base_name}{_SCORE_MODEL_SUFFIX}"


def _write(
    config: FamilyConfig,
    weights: Mapping[str, Tensor],
    folder: Path,
    extra: Mapping[str, Any] | None,
    dtype: ExportDtype,
    head: Tensor | None = None,
) -> None:
    converter = converter_of(config)
    page = converter.write_config(config) | {"dtype": dtype} | dict(extra or {})
    mappings = converter.tensor_mappings(config, page["model_type"])
    meta = dict(build_on_meta(config).named_parameters())
    heads = [] if head is None else [(_HEAD, head)]
    announced = chain(export_tensors(mappings, meta), heads)
    # `map` keeps no tensor that it has given, as a loop does until the next is there.
    tensors = map(partial(_cast, dtype), chain(export_tensors(mappings, weights), heads))
    write_folder(folder, page, tensors, outline=((name, each.to(EXPORT_DTYPES[dtype])) for name, each in announced))


def exported_names(config: FamilyConfig) -> list[str]:
    """The parameters of a network, in the order in which `save` asks for them."""
    converter = converter_of(config)
    return export_order(converter.tensor_mappings(config, converter.write_config(config)["model_type"]))


def _cast(dtype: ExportDtype, item: tuple[str, Tensor]) -> tuple[str, Tensor]:
    name, result = item[0], item[1].to(EXPORT_DTYPES[dtype])
    if dtype == "float16" and bool(result.isinf().any()):
        raise ModelError(
            f"tensor {name!r} has weights that float16 cannot hold", expected="up to 65504", fix="export as bfloat16"
        )
    return name, result


def is_hugging_face(folder: Path) -> bool:
    """Whether the folder looks like one of Hugging Face's."""
    try:
        return "model_type" in parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
