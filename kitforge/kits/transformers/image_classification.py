"""The task `image_classification`: options, labelled images, augmentation, the loss and the metrics.

B images, C channels, S pixels of a side.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.images.labelled import ImageEntry, find_images
from kitforge.data.labels import (
    ProblemType,
    find_label,
    head_labels,
    index_of,
    label_index,
    multi_hot,
    number_names,
    numbers_of,
)
from kitforge.foundation.config import check, check_least, to_dict
from kitforge.foundation.device import copy_to
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.log import logger
from kitforge.foundation.types import MicroBatch, OnInvalid, Region, Sums
from kitforge.kits.batch_predict import Predict, predict_rows
from kitforge.kits.kit import LoadModel, Prepared, RunInputs, expect_network
from kitforge.kits.language_model import FineTuningOptions, check_whole_rows, export_language_model, save_language_model
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import NetworkSource
from kitforge.kits.transformers.preprocessor import (
    PREPROCESSOR,
    augmented,
    decode_for,
    normalized,
    read_preprocessor,
    write_preprocessor,
)
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.rows import ClassifierTask, RowSplits, SplitRows, hold_out, label_probabilities
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network, families_of
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.peft import base_of, is_adapter
from kitforge.models.vit.model import ViTConfig
from kitforge.report.notebook import Rows
from kitforge.trainer.run_folder import Run

CLASSIFIER = "classifier."
# Decoded images that are kept in memory, in bytes; with more, each is decoded whenever it is needed.
_KEPT_BYTES = 2**30
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataOptions:
    """Labelled images."""

    # A folder or a .zip file with a folder of images for each label, with folders train and test (or val) above them or
    # without; or rows (jsonl, csv, parquet, datasets, dicts) with an image or its path.
    train: Any = None
    eval: Any = None  # None: the test or val folder beside train, else a fraction of the training images
    image: str = "image"  # column of rows: a path, bytes, or an image of Pillow
    label: str = "label"  # column of rows
    batch_size: int = 64  # images per step
    augment: tuple[Literal["flip", "crop"], ...] = ("flip", "crop")  # of training images; the crop moves by an eighth
    on_invalid: OnInvalid = "refuse"  # images that cannot be decoded
    eval_fraction: float = 0.05  # fraction of the training images held out if there are no others
    shuffle: bool = True

    def __post_init__(self) -> None:
        check_least("data", self, 1, "batch_size")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassificationOptions(FineTuningOptions):
    """All options of the task."""

    task: str = "image_classification"
    data: ImageDataOptions = field(default_factory=ImageDataOptions)
    # in the order of the logits; null: those of the checkpoint, else of the training rows
    labels: tuple[str | int | bool, ...] = ()
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`

    def __post_init__(self) -> None:
        FineTuningOptions.__post_init__(self)
        check(len(set(self.labels)) == len(self.labels), "labels", list(self.labels), "labels that are all distinct")
        check_whole_rows(self.parallel)


class ImageRows(SplitRows):
    """Labelled images of one size, decoded once where memory allows."""

    def __init__(self, entries: Sequence[ImageEntry], labels: Sequence[Any], config: ViTConfig) -> None:
        self._entries, self._config = entries, config
        are_lists = config.problem_type != "single_label_classification"
        shape = (len(labels), len(config.labels)) if are_lists else (len(labels),)
        self.labels = np.array(labels, np.float32 if are_lists else np.int64).reshape(shape)
        num_tokens = (config.image_size // config.patch_size) ** 2 + 1
        self.lengths = np.full(len(entries), num_tokens, np.int64)
        self.fingerprint = fingerprint_of(*(each.location for each in entries), self.labels.tobytes())
        num_bytes = len(entries) * config.num_channels * config.image_size**2
        self._kept = self._decode(range(len(entries))) if num_bytes <= _KEPT_BYTES else None

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Bytes `images` [B, C, S, S], labels [B], or zeros and ones or numbers [B, labels], and weights [B].
        Without rows, one of weight 0."""
        if not len(rows):
            size = self._config.image_size
            empty = torch.zeros(1, self._config.num_channels, size, size, dtype=torch.uint8)
            labels = torch.from_numpy(np.zeros((1, *self.labels.shape[1:]), self.labels.dtype))
            return {"images": empty, "labels": labels, "weights": torch.zeros(1)}
        images = self._decode(rows.tolist()) if self._kept is None else self._kept[torch.from_numpy(rows)]
        return {"images": images, "labels": torch.from_numpy(self.labels[rows]), "weights": torch.ones(len(rows))}

    def _decode(self, rows: Sequence[int]) -> Tensor:
        size, channels = self._config.image_size, self._config.num_channels
        found = torch.empty(len(rows), channels, size, size, dtype=torch.uint8)
        for index, row in enumerate(rows):
            found[index] = decode_for(self._config, self._entries[row])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Images of both splits that are not decoded yet."""

    train: list[ImageEntry]
    eval: list[ImageEntry] | None  # None: a fraction of the training images

    def labels(
        self, known: tuple[Any, ...], problem_type: ProblemType, *, is_fixed: bool
    ) -> tuple[tuple[Any, ...], dict[str, int]]:
        """The known labels, where any training image has one of them, else those of the images in order; those of a
        regression by the count of its numbers. And the number of each name."""
        every = [*self.train, *(self.eval or [])]
        if problem_type == "regression":
            names = number_names([(each.location, each.label) for each in every if each.label is not None], known)
            return names, index_of(names)
        fraction = next((each for each in self.train if isinstance(each.label, float)), None)
        if fraction is not None:
            expected, fix = "a text, a whole number, or a list of them", "add model.problem_type=regression"
            raise DataError(f"{fraction.location} has no label", got=fraction.label, expected=expected, fix=fix)
        own = [each.label for each in self.train if each.label is not None]
        single = [part for each in own for part in (each if isinstance(each, (list, tuple)) else (each,))]
        declared = list(dict.fromkeys(name for each in self.train or every for name in each.names))
        is_known = bool(declared) or any(find_label(each, index_of(known)) is not None for each in single) or not own
        return head_labels(known if is_known or is_fixed else (), declared, own, is_fixed=is_fixed or not self.train)


def find_files(train: object, evaluation: object, data: ImageDataOptions) -> ImageFiles:
    """The images of both splits. Raises DataError where there are none."""
    columns = {"image": data.image, "label": data.label}
    found = [] if train is None else find_images(train, "train", **columns)
    if evaluation is not None:
        return ImageFiles(train=found, eval=find_images(evaluation, "eval", **columns))
    try:
        others = find_images(train, "eval", **columns)
    except DataError:
        others = []
    # Without folders of splits both are the same images.
    is_split = bool(others) and {each.location for each in others}.isdisjoint(each.location for each in found)
    return ImageFiles(train=found, eval=others if is_split else None)


def read_images(
    files: ImageFiles, options: ImageClassificationOptions, index: dict[str, int], config: ViTConfig
) -> RowSplits[ImageRows]:
    """Decode the images that are kept. Raises DataError naming one without a known label, or that is not an image."""
    found = _usable(files.train, index, options.data, config)
    held = None if files.eval is None else _usable(files.eval, index, options.data, config)
    train, evaluation = (
        ImageRows([entry for entry, _ in each], [label for _, label in each], config)
        for each in hold_out(found, held, options.data.eval_fraction, options.seed)
    )
    return RowSplits(train=train, eval=evaluation, labels=config.labels, problem_type=config.problem_type)


def _usable(
    entries: Sequence[ImageEntry], index: dict[str, int], data: ImageDataOptions, config: ViTConfig
) -> list[tuple[ImageEntry, int | list[float]]]:
    """The images that can be used, and the number of each one's label, or a zero or one for each label."""
    is_multi_hot, is_number = (config.problem_type == each for each in ("multi_label_classification", "regression"))
    found, num_skipped = [], 0
    for entry in entries:
        if isinstance(entry.label, (list, tuple)) and not (is_multi_hot or is_number):
            expected = "one, by the problem_type of the model"
            raise DataError(f"{entry.location} has a list of labels", got=entry.label, expected=expected)
        number: int | list[float]
        if is_number:
            number = numbers_of(entry.label, list(index), entry.location)
        elif is_multi_hot and entry.label is not None:
            number = multi_hot(entry.label, index, entry.location)
        else:
            number = label_index(entry.label, index, entry.location)
        if data.on_invalid == "skip":
            try:
                decode_for(config, entry)
            except DataError:
                num_skipped += 1
                continue
        found.append((entry, number))
    if num_skipped:
        _log.warning("%d images: %d more cannot be decoded and were skipped", len(found), num_skipped)
    return found


class ImageClassificationTask(ClassifierTask):
    """Cross entropy of the labels. A micro-batch is that of `ImageRows.batch`, with the numbers of its samples and of
    the step, of which the augmentation of an image is a function."""

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        tables = [name for name in ("class_token", "position") if getattr(model, name, None) is not None]
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        heads = [name for name in trained if name == f"{CLASSIFIER}weight"]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables, heads=heads)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The images of this rank: the denominator of the mean loss."""
        rows = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        return {"loss": rows, "samples": rows}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, labels], labels [B] and weights [B] on the device; training images are augmented."""
        network = cast(VisionTransformer, model)
        images = micro_batch["images"]
        if model.training and self._options.data.augment:
            samples, step = micro_batch["samples"].tolist(), micro_batch["step"]
            images = augmented(images, self._options.data.augment, self._options.seed, step, samples)
        device = network.classifier.weight.device
        pixels, labels, weights = (
            copy_to(each, device) for each in (images, micro_batch["labels"], micro_batch["weights"])
        )
        return (
            network.logits(normalized(pixels, cast(ViTConfig, network.config)), Context(dropout=dropout_key)),
            labels,
            weights,
        )


class ImageProcessor:
    """Decodes images to the size of a network, and normalizes them as it was trained."""

    def __init__(self, config: ViTConfig) -> None:
        self._config = config

    def __call__(self, entries: Sequence[ImageEntry]) -> Tensor:
        """Numbers [B, C, S, S]. Raises DataError naming what is not an image."""
        return normalized(torch.stack([decode_for(self._config, entry) for entry in entries]), self._config)


Inputs: TypeAlias = RunInputs[ImageProcessor]
# Images that a pipeline computes at once.
_BATCH = 64


class ImageClassification(NetworkKit[ImageClassificationOptions, ImageProcessor]):
    """The task `image_classification`. Image size and normalization come from the model's config."""

    OPTIONS = ImageClassificationOptions
    KIND, ROWS, OUTPUT = "vision", "FOLDER", "LABELS.jsonl"
    PREDICTS_AS_TRAINED = True

    def prepare(
        self, options: ImageClassificationOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[ImageClassificationOptions, ImageProcessor]:
        train, evaluation = self.required_datasets(options, inputs, "images", is_evaluation=is_evaluation)
        if inputs.model is not None:
            expected = "a vision transformer: vit"
            expect_network(inputs.model, VisionTransformer, "this network reads no images", expected)
        source = NetworkSource.find(options, inputs, open_vision, is_evaluation=is_evaluation)
        files = find_files(train, evaluation, options.data)
        known = cast(ViTConfig | None, source.config)
        kind = options.model.get("problem_type") if known is None else known.problem_type
        # As in transformers, a single output that is not said to be a label is a number.
        is_number = kind != "multi_label_classification" and known is not None and len(known.labels) == 1
        kind = "regression" if is_number else kind or "single_label_classification"
        given = options.labels or (() if known is None else known.labels)
        labels, index = files.labels(given, kind, is_fixed=bool(options.labels))
        values = {**options.model, "labels": labels} if known is None else {**to_dict(known), "labels": labels}
        if kind == "regression":
            values["problem_type"] = kind
        elif known is None and files.train and all(isinstance(each.label, (list, tuple)) for each in files.train):
            values.setdefault("problem_type", "multi_label_classification")
        config: Any = config_of({"family": "vit", **values}, "vision")
        data = read_images(files, options, index, config)
        source = dataclasses.replace(source, config=config)
        if known is not None and known.labels != labels:
            # Labels that the model does not have begin with a new classifier.
            source = dataclasses.replace(source, given=None, open_stored=partial(_with_new_classifier, source))
        return Prepared(
            options=options,
            recorded=to_dict(options) | {"model": source.recorded(), "labels": list(data.labels)},
            fingerprints={"rows": data.fingerprint},
            processor=ImageProcessor(config),
            task=lambda world: (ImageClassificationTask(options, data, source.build, world), ()),
        )

    def new_config(self, options: ImageClassificationOptions) -> Any:
        return config_of({"family": "vit", **options.model, "labels": options.labels or ("0", "1")}, self.KIND)

    def dry_rows(self, options: ImageClassificationOptions) -> list[Any]:
        """An image for each label."""
        data, image = options.data, b"P6 64 64 255\n" + bytes(64 * 64 * 3)
        return [{data.image: image, data.label: each} for each in options.labels or ("0", "1")]

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        return open_vision(folder, open_run)

    def find_processor(self, folder: Path) -> ImageProcessor:
        return ImageProcessor(cast(Any, self.open_model(folder).config))

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
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
        write_text(written[0].parent / PREPROCESSOR, json.dumps(write_preprocessor(config), indent=1))
        return written

    def open_pipeline(
        self, model: nn.Module, processor: ImageProcessor, options: ImageClassificationOptions
    ) -> ImageClassificationPipeline:
        del processor, options
        return ImageClassificationPipeline(model)

    def predict_file(self, options: ImageClassificationOptions, load_model: LoadModel) -> Path:
        """Write `image`, `predicted_label` and `score` of each image of `data.eval` to the jsonl file `output`."""
        data = options.data

        def batches() -> Iterator[Sequence[ImageEntry]]:
            entries = find_images(data.eval, "eval", data.image, data.label)
            yield from (entries[start : start + _BATCH] for start in range(0, len(entries), _BATCH))

        def opened(model: nn.Module, folder: Path) -> Predict[ImageEntry]:
            del folder
            classify = ImageClassificationPipeline(model)

            def predict(part: Sequence[ImageEntry]) -> Iterator[dict[str, Any]]:
                for entry, scores in zip(part, classify.probabilities(part), strict=True):
                    best = int(scores.argmax())
                    row = {"image": entry.location, "label": entry.label}
                    yield row | {"predicted_label": classify.labels[best], "score": float(scores[best])}

            return predict

        return predict_rows(options, batches(), load_model, opened)


def open_vision(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The vision transformer of a run, a step or a Hugging Face folder; no weight is read yet."""
    stored = model_folder.open_model(folder, open_run)
    config: Any = stored.config
    if config.family not in families_of("vision"):
        raise ModelError("this model reads no images", got=config.family, expected="a vision transformer: vit")
    path = folder / PREPROCESSOR
    if not path.is_file() and is_adapter(folder):
        path = resolve(base_of(folder)) / PREPROCESSOR
    if not path.is_file():
        return stored
    return dataclasses.replace(stored, config=cast(Any, read_preprocessor(path, config)))


class ImageClassificationPipeline:
    """Labels images, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: nn.Module) -> None:
        expected = "the model of a run of image_classification"
        self._model = expect_network(model, VisionTransformer, "this model does not label images", expected).eval()
        self._config = cast(ViTConfig, model.config)
        self._process = ImageProcessor(self._config)
        self.labels = self._config.labels

    def __call__(self, images: Any, top_k: int | None = 5) -> list[Any]:
        """The `top_k` most probable `{"label", "score"}` of an image, the best first; of a list of images, a list of
        those. None: all labels. An image is a path, bytes, an image of Pillow, or an array of bytes."""
        is_list = isinstance(images, (list, tuple))
        given = list(images) if is_list else [images]
        entries = [
            ImageEntry(location=f"image {number}", label=None, read=partial(lambda image: image, each))
            for number, each in enumerate(given)
        ]
        found = Rows()
        for start in range(0, len(entries), _BATCH):
            for scores in self.probabilities(entries[start : start + _BATCH]):
                best = scores.topk(min(top_k or len(scores), len(scores)))
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append(Rows({"label": self.labels[index], "score": score} for index, score in pairs))
        return found if is_list else found[0]

    @torch.no_grad()
    def probabilities(self, entries: Sequence[ImageEntry]) -> Tensor:
        """[B, labels] on the CPU. Raises DataError naming what is not an image."""
        pixels = self._process(entries).to(self._model.position.device)
        return label_probabilities(self._model.logits(pixels), self._config.problem_type).cpu()


def _with_new_classifier(source: NetworkSource, open_run: OpenCheckpoint) -> StoredModel:
    """The weights of a source, and the first values of a classifier for the labels of its config."""
    stored = None if source.open_stored is None else source.open_stored(open_run)

    def read(name: str, region: Region | None) -> Tensor:
        if name.startswith(CLASSIFIER):
            return source.initial(name, region)
        if stored is not None:
            return stored.read(name, region)
        assert source.given is not None
        whole = source.given.get_parameter(name).detach()
        return whole if region is None else region.of(whole)

    return StoredModel(config=source.family, names=(), read=read)
