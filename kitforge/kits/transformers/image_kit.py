"""The wiring of `image_classification`: from options and objects to a run, and from a folder to a pipeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import config_of as config_of_adapter
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import check_geometry
from kitforge.core.parallel.world import World
from kitforge.data.images import ImageEntry, find_images
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import atomic_file, write_text
from kitforge.foundation.progress import show_progress
from kitforge.foundation.types import Region
from kitforge.kits.kit import LoadModel, RunInputs
from kitforge.kits.language_model import (
    LoraOptions,
    export_language_model,
    freeze,
    load_weights,
    save_language_model,
    with_adapter,
)
from kitforge.kits.transformers.image_classification import (
    CLASSIFIER,
    ImageClassificationOptions,
    ImageClassificationTask,
    ImageProcessor,
    find_files,
    read_images,
)
from kitforge.kits.transformers.preprocessor import PREPROCESSOR, read_preprocessor, write_preprocessor
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.row_kit import PreparedRows, RowKit
from kitforge.kits.transformers.rows import probabilities
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.peft import base_of, is_adapter
from kitforge.models.sharding import sharding_of_network
from kitforge.models.vit.model import ViTConfig
from kitforge.trainer.run_folder import Run

Inputs: TypeAlias = RunInputs[ImageProcessor]
# Images that a pipeline computes at once.
_BATCH = 64


@final
class ImageClassification(RowKit[ImageClassificationOptions, ImageProcessor]):
    """The task `image_classification`. Its models say themselves how they want their images."""

    OPTIONS = ImageClassificationOptions

    def prepare(self, options: ImageClassificationOptions, inputs: Inputs, *, is_evaluation: bool) -> _Prepared:
        """Everything that can be read before any rank is started."""
        return _Prepared(options, inputs, is_evaluation=is_evaluation)

    def task(
        self,
        options: ImageClassificationOptions,
        prepared: PreparedRows,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> ImageClassificationTask:
        """The loss over the rows, of the network that `build` gives."""
        assert isinstance(prepared, _Prepared)
        return ImageClassificationTask(options, prepared.data, build, world)

    def check_parallel(self, options: ImageClassificationOptions) -> None:
        """Raise ConfigError for a network that the degrees of `options` cannot split; before any rank is started."""
        if options.checkpoint is None and options.model:
            network: Any = model_folder.build_on_meta(config_of(options.model, "vision"))
            check_geometry(sharding_of_network(network), network.geometry, options.parallel)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The model of a run folder, a step folder or a Hugging Face folder, adapters merged."""
        return model_folder.load_stored(self.open_model(folder), device=device, level=level, dtype=dtype)

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder, with the normalization of its images; no weight is read yet."""
        return open_vision(folder, open_run)

    def find_processor(self, folder: Path) -> ImageProcessor:
        """What prepares images for the model of a folder."""
        return ImageProcessor(cast(Any, self.open_model(folder).config))

    def save(self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None) -> None:
        """Write a Hugging Face folder, adapters merged, with the configuration of its image processor."""
        del processor
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, nn.Module):
            save_language_model(home, folder, None, dtype)
            config: Any = config_of_network(home)
        else:
            stored = self.open_model(home)
            export_language_model(stored, folder, None, dtype)
            config = stored.config
        write_text(folder / PREPROCESSOR, json.dumps(write_preprocessor(config), indent=1))

    def export_program(self, options: ImageClassificationOptions) -> list[Path]:
        """Write the program of the model under `options.checkpoint` into the folder `options.output_dir`, with the
        configuration of its image processor."""
        written = export_programs(self, options, has_tokenizer=False)
        config: Any = self.open_model(Path(str(options.checkpoint))).config
        write_text(Path(str(options.output_dir)) / PREPROCESSOR, json.dumps(write_preprocessor(config), indent=1))
        return written

    def open_pipeline(
        self, model: nn.Module, processor: ImageProcessor, options: ImageClassificationOptions
    ) -> ImageClassificationPipeline:
        """What labels images."""
        del processor, options
        return ImageClassificationPipeline(model)

    def predict_file(self, options: ImageClassificationOptions, load_model: LoadModel) -> Path:
        """Write `image`, `predicted_label` and `score` of each image of `data.eval` to the jsonl file `output`."""
        if options.checkpoint is None or options.output is None or options.data.eval is None:
            fix = "add checkpoint=RUN data.eval=FOLDER output=labels.jsonl"
            raise ConfigError("labels need a model, images and a file for the labels", fix=fix)
        target = Path(options.output).expanduser()
        check(not target.exists(), "output", target, "a file that does not exist yet")
        classify = ImageClassificationPipeline(load_model(options.checkpoint, options.device, "fp32"))
        entries = find_images(options.data.eval, "eval", options.data.image, options.data.label)
        with (
            atomic_file(target) as file,
            show_progress("images labelled", enabled=options.trainer.progress) as progress,
        ):
            for start in range(0, len(entries), _BATCH):
                part = entries[start : start + _BATCH]
                for entry, scores in zip(part, classify.probabilities(part), strict=True):
                    best = int(scores.argmax())
                    row: dict[str, Any] = {"image": entry.location, "label": entry.label}
                    row |= {"predicted_label": classify.labels[best], "score": float(scores[best])}
                    file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
                progress(start + len(part))
        return target

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=FOLDER output=LABELS.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=FOLDER",
        ]


def open_vision(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The vision transformer of a run, a step or a Hugging Face folder; no weight is read yet."""
    stored = model_folder.open_model(folder, open_run)
    if not isinstance(cast(Any, stored.config), ViTConfig):
        got, expected = stored.config.family, "a vision transformer: vit"
        raise ModelError("this model reads no images", got=got, expected=expected)
    path = folder / PREPROCESSOR
    if not path.is_file() and is_adapter(folder):
        path = resolve(base_of(folder)) / PREPROCESSOR
    if not path.is_file():
        return stored
    return dataclasses.replace(stored, config=cast(Any, read_preprocessor(path, cast(Any, stored.config))))


@final
class ImageClassificationPipeline:
    """Labels images, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, VisionTransformer):
            expected = "the model of a run of image_classification"
            raise ModelError("this model does not label images", got=type(model).__name__, expected=expected)
        self._model = model.eval()
        config = cast(ViTConfig, model.config)
        self._process = ImageProcessor(config)
        self.labels = config.labels

    def __call__(self, images: Any, top_k: int | None = 5) -> list[Any]:
        """The `top_k` most probable `{"label", "score"}` of an image, the best first; of a list of images, a list of
        those. None: all labels. An image is a path, bytes, an image of Pillow, or an array of bytes."""
        is_list = isinstance(images, (list, tuple))
        given = list(images) if is_list else [images]
        entries = [
            ImageEntry(location=f"image {number}", label=None, read=partial(_self, each))
            for number, each in enumerate(given)
        ]
        found = list[list[dict[str, Any]]]()
        for start in range(0, len(entries), _BATCH):
            for scores in self.probabilities(entries[start : start + _BATCH]):
                best = scores.topk(min(top_k or len(scores), len(scores)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([{"label": self.labels[index], "score": score} for index, score in pairs])
        return found if is_list else found[0]

    @torch.no_grad()
    def probabilities(self, entries: Sequence[ImageEntry]) -> Tensor:
        """[B, labels] on the CPU. Raises DataError naming what is no image."""
        pixels = self._process(entries).to(self._model.position.device)
        return probabilities(self._model.logits(pixels), cast(ViTConfig, self._model.config).problem_type).cpu()


def _self(value: Any) -> Any:
    return value


@final
class _Prepared:
    """Images and labels of a run, and how its network is built."""

    def __init__(self, options: ImageClassificationOptions, inputs: Inputs, *, is_evaluation: bool) -> None:
        self._options, self._given, self._is_evaluation = options, inputs.model, is_evaluation
        train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
        evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
        # An evaluation reads the training images only if the evaluation images are split off them.
        train = None if is_evaluation and evaluation is not None else train
        if train is None and evaluation is None:
            raise ConfigError("there are no images", got="data.train=null", fix="add data.train=FOLDER")
        stored = None
        if self._given is None and options.checkpoint is not None:
            stored = open_vision(Path(options.checkpoint), partial(find_checkpoint, verify=False))
        elif options.lora.is_on and self._given is None:
            fix = "name a run or a folder: checkpoint=RUN"
            raise ConfigError("an adapter needs a model to adapt", got=f"lora.rank={options.lora.rank}", fix=fix)
        files = find_files(train, evaluation, options.data)
        config = self._known_config(stored)
        kind = options.model.get("problem_type") if config is None else config.problem_type
        # As in transformers, a single output that is not said to be a label is a number.
        is_number = kind != "multi_label_classification" and config is not None and len(config.labels) == 1
        kind = "regression" if is_number else kind or "single_label_classification"
        labels = options.labels or files.labels(() if config is None else config.labels, kind)
        # Labels that the model does not have begin with a new classifier.
        self._has_classifier = config is not None and config.labels == labels
        values = {**options.model, "labels": labels} if config is None else {**to_dict(config), "labels": labels}
        if kind == "regression":
            values["problem_type"] = kind
        elif files.has_lists and config is None:
            values.setdefault("problem_type", "multi_label_classification")
        self.config = cast(ViTConfig, config_of({"family": "vit", **values}, "vision"))
        self.data = read_images(files, options, labels, self.config)
        self.processor = ImageProcessor(self.config)

    def recorded(self) -> dict[str, Any]:
        """The options of the model, and its labels, as a checkpoint records them."""
        return {"model": {"family": self.config.family, **to_dict(self.config)}, "labels": list(self.data.labels)}

    def build(self, world: World) -> nn.Module:
        """The network on the device, cut as the world's degrees say; with its adapter if it is to be trained."""
        options = self._options
        lora, frozen = (LoraOptions(), ()) if self._is_evaluation else (options.lora, options.freeze)
        if self._given is not None and self._has_classifier:
            model = self._given.to(world.device)
            _adapt(model, lora if config_of_adapter(model) is None else LoraOptions(), frozen, options.seed)
            parallel_model_of(model, world, sharding_of_network(model))
            return self._ready(model)
        model = cast(Any, model_folder.build_on_meta(cast(Any, self.config), options.compile_level))
        _adapt(model, lora, frozen, options.seed)
        parallel = parallelize(model, sharding_of_network(model), world)
        parallel.materialize(world.device)
        shards = parallel.parameters()
        regions = {name: parallel.region(name) for name in shards}
        plain = {
            name: shard for name, shard in shards.items() if ".adapters." not in name and not name.endswith("scales")
        }
        init_weights(plain.items(), self.config.num_layers, options.seed, regions)
        if self._given is not None:
            held = dict(self._given.named_parameters())
            self._copy(plain, lambda name, region: region.of(held[name].detach()), regions)
        elif options.checkpoint is not None:
            stored = open_vision(Path(options.checkpoint), partial(find_checkpoint, world=world))
            kept = {name: shard.clone() for name, shard in plain.items() if name.startswith(CLASSIFIER)}
            source = stored if self._has_classifier else _without_classifier(stored, self.config)
            load_weights(parallel, source, lora, options.seed)
            if not self._has_classifier:
                for name, shard in kept.items():
                    plain[name].data.copy_(shard)
        return self._ready(model)

    @torch.no_grad()
    def _copy(self, shards: Mapping[str, Tensor], read: Any, regions: Mapping[str, Region]) -> None:
        for name, shard in shards.items():
            if not name.startswith(CLASSIFIER):
                shard.copy_(read(name, regions[name]))

    def _ready(self, model: Any) -> nn.Module:
        model.recompute = self._options.trainer.activation_checkpointing
        if self._options.compile_level == "O2":
            model.compile_blocks()
        return cast(nn.Module, model)

    def _known_config(self, stored: StoredModel | None) -> ViTConfig | None:
        if self._given is None:
            return None if stored is None else cast(Any, stored.config)
        if not isinstance(self._given, VisionTransformer):
            got, expected = type(self._given).__name__, "a vision transformer: vit"
            raise ModelError("this network reads no images", got=got, expected=expected)
        return cast(ViTConfig, self._given.config)


def _without_classifier(stored: StoredModel, config: ViTConfig) -> StoredModel:
    """The model with a classifier of zeros for other labels."""
    shapes = {f"{CLASSIFIER}weight": (len(config.labels), config.dim), f"{CLASSIFIER}bias": (len(config.labels),)}

    def read(name: str, region: Region | None) -> Tensor:
        if name not in shapes:
            return stored.read(name, region)
        whole = torch.zeros(shapes[name])
        return whole if region is None else region.of(whole)

    return dataclasses.replace(stored, read=read)


def _adapt(model: Any, lora: LoraOptions, frozen: Sequence[str], seed: int) -> None:
    """Freeze parameters, or add an adapter beside which the classifier is trained."""
    freeze(model, frozen)
    if lora.is_on:
        with_adapter(model, lora, seed)
        model.classifier.requires_grad_(True)


IMAGE_CLASSIFICATION = ImageClassification()
