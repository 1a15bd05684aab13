"""Loads models from run folders and Hugging Face folders, and exports them as Hugging Face folders."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.hugging_face import CONFIG, read_folder, write_folder
from kitforge.core.checkpoint.load import Checkpoint, check_shapes, find_checkpoint, load_tensors
from kitforge.core.kernels.autograd.mixed_precision import NATIVE_DTYPES
from kitforge.core.kernels.dispatch import CompileLevel, kernels_of_network
from kitforge.core.kernels.quantized_linear.reference import Blocks, dequantize
from kitforge.core.nn.decode_step import is_fusable
from kitforge.core.nn.decoder import Decoder, FamilyConfig
from kitforge.core.nn.init import init_weights, materialize
from kitforge.core.nn.lora import FACTORS, LoraConfig, adapter_tensors, attach, merge_factors
from kitforge.core.nn.quantized import keep_blocks, quantize_linears
from kitforge.core.nn.score_head import BACKBONE, HEAD, HEAD_BIAS, POOLER, POOLER_BIAS
from kitforge.data.gguf_file import GGUF_SUFFIX, is_gguf
from kitforge.data.labels import ProblemType
from kitforge.foundation.config import check
from kitforge.foundation.dtype import DTYPES, EXPORT_DTYPES, ExportDtype, LoadDtype, export_dtype
from kitforge.foundation.errors import ModelError
from kitforge.foundation.types import Region
from kitforge.foundation.untrusted import parse_json
from kitforge.models.catalog import (
    FAMILIES,
    Kind,
    config_of,
    converter_of,
    converter_of_type,
    exact_names,
    exportable_config,
    initial_deviations,
    without_head,
)
from kitforge.models.classifier_heads import SEQUENCE_CLASSIFIER, head_names
from kitforge.models.gguf import WRITTEN, GgufWeights, write_gguf
from kitforge.models.hub import resolve
from kitforge.models.llama.model import LlamaConfig
from kitforge.models.peft import base_of, is_adapter, merge_adapter
from kitforge.models.weight_mapping import (
    HEADS,
    TensorReader,
    export_order,
    export_tensors,
    held_shapes,
    import_tensors,
)

# Further numbers of our reward head, stored as `score_<name>` in config.json, which transformers ignores.
SCORE_KEYS = ("bias", "mean", "deviation")
# Finds the checkpoint of a folder, collectively over all ranks; None where there is none.
OpenCheckpoint: TypeAlias = Callable[[Path], Checkpoint | None]


def build(
    config: FamilyConfig,
    *,
    device: torch.device,
    level: CompileLevel = "O1",
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A language model on the device with initial weights under `seed`; without a seed its weights are not initialized,
    as the caller loads them next. Norms that are stored without their offset keep fp32, in which it is added."""
    model = build_on_meta(config, level, device.type).to(dtype)
    for name in exact_names(config) if dtype.itemsize < 4 else ():
        model.get_parameter(name).data = model.get_parameter(name).float()
    materialize(model, device)
    if seed is not None:
        layers = model.geometry.num_layers
        init_weights(model.named_parameters(), layers, seed, deviations=initial_deviations(config))
    return model


def build_on_meta(config: FamilyConfig, level: CompileLevel = "O1", device: str = "cpu") -> Decoder:
    """A language model on the meta device: shapes without memory. `device`: the type of the one that it will run on."""
    with torch.device("meta"):
        return cast(Decoder, FAMILIES[config.family].build(config, kernels_of_network(level, device)))


class WeightFiles(Protocol):
    """Published weights on disk: a Hugging Face folder, or a GGUF file in its words."""

    path: Path
    config: dict[str, Any]  # of config.json

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all tensors by Hugging Face's names."""

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which a tensor is stored; None for one that torch does not have."""

    def tensor(self, name: str) -> Tensor:
        """A tensor, in that dtype or a wider one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model on disk whose shapes have been checked. Its weights are memory-mapped and read one by one."""

    config: FamilyConfig
    names: tuple[str, ...]  # our names of all weights
    # Reads a weight, or one region of it, in the dtype in which it is stored.
    read: Callable[[str, Region | None], Tensor]
    # The head of a classifier, `score.weight` [labels, dim], of an encoder behind `pooler.weight` [dim, dim], which may
    # also be all there is; of a reward model with one row and further tensors `score.<name>`.
    head: Mapping[str, Tensor] = field(default_factory=dict)
    labels: tuple[Any, ...] = ("LABEL_0",)  # of a model with a head
    problem_type: ProblemType = "single_label_classification"  # of a classifier of texts
    suffix: str = SEQUENCE_CLASSIFIER  # of the class of a model with a head in transformers
    dtype: torch.dtype = torch.float32  # of most weights as stored
    pad_id: int | None = None  # padding token of a published classifier, whose outputs do not count; None: all count
    # Reads a weight as it is quantized in the file, by our name, where layers compute with this quantization.
    blocks: Mapping[str, Callable[[], Blocks]] = field(default_factory=dict)
    is_run: bool = False  # a classifier of ours, whose padding token is that of its tokenizer

    def tensors(self, regions: Mapping[str, Region]) -> Iterator[tuple[str, Tensor]]:
        """All weights by name; of weights in `regions` only that region."""
        return ((name, self.read(name, regions.get(name))) for name in self.names)


def load(folder: Path, *, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32") -> Decoder:
    """The unsharded model of a run folder, a step folder, a Hugging Face folder or a GGUF file."""
    return load_stored(open_model(folder), device=device, level=level, dtype=dtype)


def load_stored(
    stored: StoredModel, *, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
) -> Decoder:
    """The unsharded model of an opened folder. Its weights are in memory in `dtype` alone: those of a file are copied
    from its memory-mapped pages. "auto" is the dtype as stored; float16 becomes fp32 on CPU, which has no products in
    it, and so does any dtype that is not offered. Weights in Q8_0 and Q4_0 of a dense decoder stay so there."""
    check(dtype in ("auto", *DTYPES), "dtype", dtype, f"one of auto, {', '.join(DTYPES)}")
    if dtype == "auto" and device.type == "cpu" and (kept := _with_blocks(stored, level)) is not None:
        return kept
    chosen = stored.dtype if dtype == "auto" else DTYPES[dtype]
    if dtype == "auto" and (chosen not in DTYPES.values() or (chosen, device.type) == (torch.float16, "cpu")):
        chosen = torch.float32
    model = build(stored.config, device=device, level=level, dtype=chosen)
    load_tensors(dict(model.named_parameters()), stored.tensors({}), what="model")
    return model


def _with_blocks(stored: StoredModel, level: CompileLevel) -> Decoder | None:
    """The model on a CPU with its quantized weights as stored, the others in bfloat16, or in fp32 where the processor
    has no products in it; None without quantized weights and where no compiled step runs the network."""
    dtype = torch.bfloat16 if NATIVE_DTYPES[torch.bfloat16] else torch.float32
    model = build(stored.config, device=torch.device("cpu"), level=level, dtype=dtype) if stored.blocks else None
    if model is None or not is_fusable(model):
        return None
    left = keep_blocks(model, stored.blocks)
    load_tensors(left, ((name, stored.read(name, None)) for name in stored.names if name in left), what="model")
    return model


def open_model(folder: Path, open_run: OpenCheckpoint = find_checkpoint, *, reads_head: bool = True) -> StoredModel:
    """Open a run folder, a step folder, a Hugging Face folder, a GGUF file or the folder of a PEFT adapter, which names
    its base model; reads no weights. Without `reads_head` a Hugging Face folder may lack the head of a language model.
    Raises ModelError where names or shapes of the tensors do not match the configuration."""
    if is_gguf(folder):
        source = GgufWeights(folder)
        return replace(_open_weights(source), blocks=source.blocks())
    if not folder.is_dir():
        expected = "a run, a step or a Hugging Face folder, or a .gguf file"
        raise ModelError("there is no such folder", got=folder, expected=expected)
    if is_adapter(folder):
        base = open_model(resolve(base_of(folder)), open_run, reads_head=reads_head)
        return replace(base, read=merge_adapter(base.config, base.read, folder), blocks={})
    checkpoint = open_run(folder)
    if checkpoint is None:
        files = read_folder(folder)
        return _open_weights(files) if reads_head else _open_headed(files, {})
    values = checkpoint.state.get("config", {}).get("model")
    if not isinstance(values, Mapping) or "family" not in values:
        raise ModelError(
            "the checkpoint does not record its model configuration",
            got=checkpoint.folder,
            expected="a run of one of the families",
            fix="build your own network and pass it to Trainer, with resume= this folder",
        )
    return open_decoder(checkpoint)


def open_decoder(checkpoint: Checkpoint, prefix: str = "") -> StoredModel:
    """The decoder of a run whose parameter names have the prefix, weights dequantized and adapters merged; reads no
    weights yet. Raises ModelError for tensors that do not match the configuration."""
    config = config_of(checkpoint.state["config"]["model"])
    held = {name: shape for name, shape in checkpoint.shapes("model").items() if name.startswith(prefix)}
    shapes = {name.removeprefix(prefix): shape for name, shape in held.items()}
    check_count(config, len(shapes), checkpoint.folder)
    network = build_on_meta(config)
    names, lora = tuple(name for name, _ in network.named_parameters()), checkpoint.state["config"].get("lora") or {}
    adapter = next((name.split(".")[-2] for name in shapes if ".adapters." in name), None)
    if adapter is not None:
        kind: Any = "dora" if lora.get("kind") == "dora" else "lora"
        targets = tuple(lora["target_modules"])
        attach(network, adapter, LoraConfig(kind=kind, rank=lora["rank"], alpha=lora["alpha"], target_modules=targets))
    if any(name.endswith(".scales") for name in shapes):
        quantize_linears(network, lora["bits"])
    check_shapes(dict(network.named_parameters()), shapes, what="model")
    factors = {} if adapter is None else {path: len(each) for path, each in adapter_tensors(network, adapter).items()}
    scale = lora["alpha"] / lora["rank"] if adapter is not None else 1.0

    def part(name: str, region: Region | None = None) -> Tensor:
        name = prefix + name
        return checkpoint.tensor(name) if region is None else checkpoint.read(name, region)

    def read(name: str, region: Region | None) -> Tensor:
        path = name.removesuffix(".weight")
        has_adapter = path != name and path in factors
        if not has_adapter and f"{path}.scales" not in shapes:
            return part(name, region)
        weight = part(name)
        if f"{path}.scales" in shapes:
            weight = dequantize(weight, part(f"{path}.scales"))
        if has_adapter:
            # Merged in fp32, as in memory.
            members = [part(f"{path}.adapters.{adapter}.{each}").float() for each in FACTORS[: factors[path]]]
            weight = merge_factors(weight, members, scale)
        return weight if region is None else region.of(weight)

    return StoredModel(config=config, names=names, read=read)


def open_scored(checkpoint: Checkpoint) -> StoredModel:
    """The decoder of a run that trained it with a head, and the head, see `StoredModel.head`."""
    names = {name: name for name in (HEAD, HEAD_BIAS, POOLER, POOLER_BIAS)}
    held = checkpoint.names("model")
    names |= {f"score.{name}": name for name in ("mean", "deviation")}
    head = {ours: checkpoint.tensor(name) for ours, name in names.items() if name in held}
    return replace(open_decoder(checkpoint, BACKBONE), head=head)


def kind_of(folder: Path) -> Kind | None:
    """The kind of network that a Hugging Face folder holds; None for another folder, or an unknown architecture."""
    try:
        model_type = parse_json((folder / CONFIG).read_bytes()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    families = (each for each in FAMILIES.values() if each.convert is not None)
    return next((each.kind for each in families if each.convert and model_type in each.convert.model_types), None)


def labels_of(folder: Path, suffix: str = SEQUENCE_CLASSIFIER) -> tuple[str, ...] | None:
    """The labels of the Hugging Face folder of a classifier whose class ends so; None for another folder."""
    try:
        values = parse_json((folder / CONFIG).read_bytes())
        architectures = values.get("architectures")
    except (OSError, ValueError, AttributeError):
        return None
    names = architectures if isinstance(architectures, list) else []
    if not any(isinstance(each, str) and each.endswith(suffix) for each in names):
        return None
    named = values.get("id2label")
    if isinstance(named, dict) and all(str(number) in named for number in range(len(named))):
        return tuple(str(named[str(number)]) for number in range(len(named)))
    count = values.get("num_labels")
    # Without a word of them, transformers has two.
    return tuple(f"LABEL_{number}" for number in range(count if isinstance(count, int) else 2))


def open_classifier(folder: Path, suffix: str = SEQUENCE_CLASSIFIER) -> StoredModel:
    """Open the Hugging Face folder of a classifier whose class ends so: backbone, head [labels, dim] and labels; reads
    no weights of the backbone. Raises ModelError for a head of other labels than config.json names."""
    source, labels = read_folder(folder), labels_of(folder, suffix) or ()
    names = head_names(str(source.config.get("model_type")), suffix)
    shape = source.shapes().get(names[HEAD])
    if shape is None or shape[0] != len(labels):
        got = f"no {names[HEAD]}" if shape is None else f"a head of {shape[0]}"
        raise ModelError(f"{folder} does not hold its classifier", got=got, expected=f"{len(labels)} labels")
    kind, known = source.config.get("problem_type"), get_args(ProblemType)
    if kind is not None and kind not in known:
        raise ModelError("config.json has an unknown problem_type", got=kind, expected=" or ".join(known))
    return replace(_open_headed(source, names), labels=labels, suffix=suffix, problem_type=kind or known[0])


def pooler_of(folder: Path) -> dict[str, Tensor]:
    """The pooler of the Hugging Face folder of a BERT without a classifier, with which one begins, as in transformers;
    empty for another folder."""
    if kind_of(folder) != "encoder":
        return {}
    source = read_folder(folder)
    names = head_names(str(source.config.get("model_type")), SEQUENCE_CLASSIFIER)
    held, ours = source.shapes().keys(), (POOLER, POOLER_BIAS)
    # BertModel's names have no prefix.
    found = (
        {name: prefix + names[name].removeprefix("bert.") for name in ours if name in names} for prefix in ("bert.", "")
    )
    theirs = next((each for each in found if held >= {*each.values()}), {})
    return {name: source.tensor(each) for name, each in theirs.items()}


def open_reward_folder(folder: Path) -> StoredModel:
    """Open the Hugging Face folder of a reward model: backbone and head; reads no weights of the backbone. Raises
    ModelError unless it has exactly one label."""
    source = read_folder(folder)
    shape = source.shapes().get(HEAD)
    if shape is None or shape[0] != 1:
        raise ModelError(
            f"{folder} does not hold a reward model",
            got="no score.weight" if shape is None else f"{shape[0]} scores a text",
            expected="one score a text (num_labels=1)",
        )
    stored = _open_headed(source, {name: name for name in (HEAD, HEAD_BIAS)})
    ours = {name: source.config.get(f"score_{name}") for name in SCORE_KEYS}
    numbers = {f"score.{name}": torch.tensor(value) for name, value in ours.items() if isinstance(value, (int, float))}
    return replace(stored, head={**numbers, **stored.head})


def _open_headed(source: WeightFiles, names: Mapping[str, str]) -> StoredModel:
    """Published weights with a head, whose tensors have these names there."""
    # The language-model head is never used, so none is built.
    stored = _open_weights(source, {"tie_word_embeddings": True}, (*names.values(), *HEADS))
    head = {ours: source.tensor(theirs) for ours, theirs in names.items() if theirs in source.shapes()}
    pad_id = source.config.get("pad_token_id")
    return replace(stored, head=head, pad_id=pad_id if isinstance(pad_id, int) else None)


def _open_weights(
    source: WeightFiles, changes: Mapping[str, Any] = MappingProxyType({}), left_out: tuple[str, ...] = ()
) -> StoredModel:
    """Open published weights, with changes to their config.json and without the tensors of `left_out`."""
    model_type = str(source.config.get("model_type"))
    converter = converter_of_type(model_type)
    try:
        config = converter.read_config({**source.config, **changes})
    except KeyError as error:
        raise ModelError("config.json lacks a key", got=source.path, expected=f"the key {error}") from None
    shapes = {name: shape for name, shape in source.shapes().items() if name not in left_out}
    check_count(config, len(shapes), source.path)
    mappings = converter.mappings_of(config, model_type, shapes)
    expected = dict(export_tensors(mappings, dict(build_on_meta(config).named_parameters()).__getitem__))
    check_shapes(expected, held_shapes(converter, mappings, shapes), what=f"{source.path}: the network")
    most_common = Counter(source.dtype(name) for name in shapes).most_common(1)[0][0]
    published = next((name for name, dtype in EXPORT_DTYPES.items() if dtype == most_common), "float32")

    @cache
    def readers() -> dict[str, TensorReader]:
        return import_tensors(converter, mappings, shapes, source.tensor)

    def read(name: str, region: Region | None) -> Tensor:
        return readers()[name](region)

    names = tuple(dict.fromkeys(mapping.ours for mapping in mappings))
    # Every family's options are a dataclass with this field.
    published_config = replace(cast(Any, config), dtype=published)
    return StoredModel(config=published_config, names=names, read=read, dtype=most_common or torch.float32)


def check_count(config: FamilyConfig, num_tensors: int, folder: Path) -> None:
    """Raise ModelError for a configuration with more layers than the folder has tensors, before a network of that size
    is built."""
    if config.num_layers > num_tensors:
        raise ModelError(
            f"{folder} does not hold the network of its configuration",
            got=f"{num_tensors} tensors",
            expected=f"those of {config.num_layers} layers",
        )


def save(
    model: nn.Module,
    folder: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    read: Callable[[str], Tensor] | None = None,
    dtype: ExportDtype | None = None,
) -> None:
    """Write a language model as a Hugging Face folder, or as a GGUF file where `folder` ends so, one tensor at a time.

    `extra` is added to config.json (token ids), or to the metadata of the file (its tokenizer). `read` gives the whole
    tensors of a sharded or adapted model. `dtype` defaults to that of the published weights. Raises ModelError for a
    network outside the catalog and for a weight that float16 cannot hold.
    """
    config = exportable_config(model)
    _write(config, read or dict(model.named_parameters()).__getitem__, folder, extra, dtype or config.dtype)


def export(
    stored: StoredModel, folder: Path, *, extra: Mapping[str, Any] | None = None, dtype: ExportDtype | None = None
) -> None:
    """`save` of a model on disk, from file to file: one tensor at a time is in memory, in the dtype of the export. A
    classifier becomes one of transformers. Those of whole texts have no bias: that of a reward model is stored in
    config.json, with mean and standard deviation of the scores."""
    chosen = dtype or stored.config.dtype

    def read(name: str) -> Tensor:
        tensor = stored.read(name, None)
        if not tensor.is_floating_point():
            raise ModelError(f"tensor {name!r} is not a weight", got=tensor.dtype, expected="floating point")
        # The few vectors are cast when they are written: from some an offset is subtracted first.
        return tensor if tensor.dim() == 1 else tensor.to(export_dtype(chosen))

    if HEAD not in stored.head:
        _write(stored.config, read, folder, extra, chosen)
        return
    values = {**(extra or {}), **_head_values(stored)}
    names = head_names(converter_of(stored.config).write_config(stored.config)["model_type"], stored.suffix)
    head = {theirs: stored.head[ours] for ours, theirs in names.items()}
    _write(without_head(stored.config), read, folder, values, chosen, head)


def config_values(stored: StoredModel, dtype: ExportDtype, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of an exported model, with `extra`. Raises ModelError where Hugging Face has no such model."""
    config = without_head(stored.config) if HEAD in stored.head else stored.config
    head = _head_values(stored) if HEAD in stored.head else {}
    return {**converter_of(config).write_config(config), "dtype": dtype, **extra, **head}


def _head_values(stored: StoredModel) -> dict[str, Any]:
    written = converter_of(stored.config).write_config(stored.config)
    others = stored.head.keys() - head_names(written["model_type"], stored.suffix)
    numbers = {name: stored.head[f"score.{name}"] for name in SCORE_KEYS if f"score.{name}" in others}
    values: dict[str, Any] = {f"score_{name}": float(number) for name, number in numbers.items()}
    name, ends = written["architectures"][0], ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "Model")
    base_name = next((name.removesuffix(end) for end in ends if name.endswith(end)), None)
    if base_name is None:
        raise ModelError("Hugging Face has no classifier of this architecture", got=name, expected="a *ForCausalLM")
    values |= {"architectures": [f"{base_name}{stored.suffix}"]}
    values |= {"id2label": {str(number): str(label) for number, label in enumerate(stored.labels)}}
    values |= {"label2id": {str(label): number for number, label in enumerate(stored.labels)}}
    if stored.problem_type != "single_label_classification":
        values |= {"problem_type": stored.problem_type}
    # The token by which a published classifier finds the end of a text may be another than the tokenizer's.
    return values | ({} if stored.pad_id is None else {"pad_token_id": stored.pad_id})


def _write(
    config: FamilyConfig,
    read: Callable[[str], Tensor],
    folder: Path,
    extra: Mapping[str, Any] | None,
    dtype: ExportDtype,
    head: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    converter = converter_of(config)
    values = converter.write_config(config)
    mappings = converter.tensor_mappings(config, values["model_type"])
    meta = dict(build_on_meta(config).named_parameters())
    if folder.suffix == GGUF_SUFFIX:
        got = "a classifier or reward model" if head else values["model_type"]
        if got not in WRITTEN:
            expected = f"a language model of {', '.join(WRITTEN)}"
            fix = "export a Hugging Face folder, of which llama.cpp's convert_hf_to_gguf.py may make one"
            raise ModelError("this model cannot be written as a GGUF file", got=got, expected=expected, fix=fix)
        outline = {name: tuple(each.shape) for name, each in export_tensors(mappings, meta.__getitem__)}
        write_gguf(folder, cast(LlamaConfig, config), outline, export_tensors(mappings, read), extra or {}, dtype)
        return
    if dtype == "q8_0":
        fix = "add format=gguf, or export as bfloat16"
        raise ModelError("a Hugging Face folder holds no blocks of GGUF", got="dtype=q8_0", fix=fix)
    values |= {"dtype": dtype} | dict(extra or {})

    def cast_to_dtype(item: tuple[str, Tensor]) -> tuple[str, Tensor]:
        name, result = item[0], item[1].to(EXPORT_DTYPES[dtype])
        if dtype == "float16" and bool(result.isinf().any()):
            message = f"tensor {name!r} has weights that float16 cannot hold"
            raise ModelError(message, expected="up to 65504", fix="export as bfloat16")
        return name, result

    shapes = chain(export_tensors(mappings, meta.__getitem__), head.items())
    # `map` holds no reference to a tensor that it has yielded; a loop would hold it until the next one is read.
    tensors = map(cast_to_dtype, chain(export_tensors(mappings, read), head.items()))
    write_folder(folder, values, tensors, outline=((name, each.to(EXPORT_DTYPES[dtype])) for name, each in shapes))


def exported_names(config: FamilyConfig) -> list[str]:
    """The parameters of a network, in the order in which `save` reads them."""
    converter = converter_of(config)
    return export_order(converter.tensor_mappings(config, converter.write_config(config)["model_type"]))
