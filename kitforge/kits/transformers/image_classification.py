"""The task `image_classification`: options, labelled images, augmentation, the loss and the metrics.

B images, C channels, S pixels of a side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.images import ImageEntry, Resizing, decode, find_images
from kitforge.data.labels import (
    ProblemType,
    find_label,
    index_of,
    label_index,
    multi_hot,
    names_of,
    number_names,
    numbers_of,
)
from kitforge.data.schedule import train_eval_split
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.log import logger
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.transformers.rows import ClassifierTask
from kitforge.models.vit.model import ViTConfig
from kitforge.trainer.options import RunOptions

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
    on_invalid: Literal["refuse", "skip"] = "refuse"  # images that cannot be decoded
    eval_fraction: float = 0.05  # fraction of the training images held out if there are no others
    shuffle: bool = True

    def __post_init__(self) -> None:
        check(self.batch_size > 0, "data.batch_size", self.batch_size, "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageClassificationOptions(RunOptions):
    """All options of the task."""

    task: str = "image_classification"
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    data: ImageDataOptions = field(default_factory=ImageDataOptions)
    labels: tuple[str, ...] = ()  # in the order of the logits; null: those of the checkpoint, else of the training rows
    lora: LoraOptions = field(default_factory=LoraOptions)
    freeze: tuple[str, ...] = ()  # parameters that are not trained, as patterns: ["blocks.*"]
    # Run, folder, or Hub id (NAME/MODEL@REVISION) with the weights.
    checkpoint: str | None = None
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`
    output: str | None = None  # jsonl file of `predict`

    def __post_init__(self) -> None:
        self.lora.check_parallel(self.parallel)
        is_one = not (self.freeze and self.lora.is_on)
        check(is_one, "freeze", list(self.freeze), "nothing with lora.rank, which freezes all weights")
        check(len(set(self.labels)) == len(self.labels), "labels", list(self.labels), "labels that are all distinct")
        degrees = self.parallel
        is_whole = degrees.tensor == 1 or not degrees.sequence_parallel
        fix = "add parallel.sequence_parallel=false"
        check(is_whole, "parallel.sequence_parallel", True, "false for images", fix)


@final
class ImageRows:
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

    def __len__(self) -> int:
        return len(self._entries)

    def batch(self, rows: NDArray[np.int64], _pad_id: int) -> dict[str, Tensor]:
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageData:
    """Training and evaluation images, and the names of their labels."""

    train: ImageRows
    eval: ImageRows
    labels: tuple[str, ...]
    problem_type: ProblemType
    pad_id: int = 0

    @property
    def fingerprint(self) -> str:
        """Of all images."""
        return fingerprint_of(self.train.fingerprint, self.eval.fingerprint, self.labels)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFiles:
    """Images of both splits that are not decoded yet."""

    train: list[ImageEntry]
    eval: list[ImageEntry] | None  # None: a fraction of the training images

    def labels(self, known: tuple[str, ...], problem_type: ProblemType) -> tuple[str, ...]:
        """The known labels, where any training image has one of them, else those of the images in order; those of a
        regression by the count of its numbers."""
        if problem_type == "regression":
            every = [*self.train, *(self.eval or [])]
            return number_names([(each.location, each.label) for each in every if each.label is not None], known)
        fraction = next((each for each in self.train if isinstance(each.label, float)), None)
        if fraction is not None:
            expected, fix = "a text, a whole number, or a list of them", "add model.problem_type=regression"
            raise DataError(f"{fraction.location} has no label", got=fraction.label, expected=expected, fix=fix)
        own = [each.label for each in self.train if each.label is not None]
        single = [part for each in own for part in (each if isinstance(each, (list, tuple)) else (each,))]
        is_known = any(find_label(each, index_of(known)) is not None for each in single) or not own
        return known if known and is_known else names_of(own)

    @property
    def has_lists(self) -> bool:
        """Whether each training image has a list of labels."""
        return bool(self.train) and all(isinstance(each.label, (list, tuple)) for each in self.train)


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
    files: ImageFiles, options: ImageClassificationOptions, labels: tuple[str, ...], config: ViTConfig
) -> ImageData:
    """Decode the images that are kept. Raises DataError naming one without a known label, or that is no image."""
    train, held = (_usable(each or [], labels, options.data, config) for each in (files.train, files.eval))
    if files.eval is None:
        kept, held_out = train_eval_split(len(train), options.data.eval_fraction, options.seed)
        train, held = [train[index] for index in kept], [train[index] for index in held_out]
    rows = [ImageRows([entry for entry, _ in each], [label for _, label in each], config) for each in (train, held)]
    return ImageData(train=rows[0], eval=rows[1], labels=labels, problem_type=config.problem_type)


def _usable(
    entries: Sequence[ImageEntry], names: tuple[str, ...], data: ImageDataOptions, config: ViTConfig
) -> list[tuple[ImageEntry, int | list[float]]]:
    """The images that can be used, and the number of each one's label, or a zero or one for each label."""
    is_multi_hot, is_number = (config.problem_type == each for each in ("multi_label_classification", "regression"))
    index, found, num_skipped = index_of(names), [], 0
    for entry in entries:
        if isinstance(entry.label, (list, tuple)) and not (is_multi_hot or is_number):
            expected = "one, by the problem_type of the model"
            raise DataError(f"{entry.location} has a list of labels", got=entry.label, expected=expected)
        number: int | list[float]
        if is_number:
            number = numbers_of(entry.label, names, entry.location)
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


@final
class ImageClassificationTask(ClassifierTask):
    """Cross entropy of the labels. A micro-batch is that of `ImageRows.batch`, with the numbers of its samples and of
    the step, of which the augmentation of an image is a function."""

    def __init__(
        self,
        options: ImageClassificationOptions,
        data: ImageData,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        rows = options.data
        super().__init__(options, data, build, world, batch_size=rows.batch_size, shuffle=rows.shuffle)
        self._options = options
        self.num_labels = len(data.labels)
        self.problem_type = data.problem_type

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Weight decay for matrices only: not for positions, the class token, norms and biases."""
        tables = [name for name in ("class_token", "position") if hasattr(model, name)]
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        heads = [name for name in trained if name == f"{CLASSIFIER}weight"]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables, heads=heads)

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The images of this rank: the denominator of the mean loss."""
        rows = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        return {"loss": rows, "samples": rows}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, noise: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, labels], labels [B] and weights [B] on the device; training images are augmented."""
        network = cast(VisionTransformer, model)
        images = micro_batch["images"]
        if model.training and self._options.data.augment:
            samples, step = micro_batch["samples"].tolist(), micro_batch["step"]
            images = augmented(images, self._options.data.augment, self._options.seed, step, samples)
        device = network.position.device
        pixels, labels, weights = (
            copy_to(each, device) for each in (images, micro_batch["labels"], micro_batch["weights"])
        )
        config = cast(ViTConfig, network.config)
        return network.logits(normalized(pixels, config), Context(dropout=noise)), labels, weights


@final
class ImageProcessor:
    """Decodes images to the size of a network, and normalizes them as it was trained."""

    def __init__(self, config: ViTConfig) -> None:
        self._config = config

    def __call__(self, entries: Sequence[ImageEntry]) -> Tensor:
        """Numbers [B, C, S, S]. Raises DataError naming what is no image."""
        return normalized(torch.stack([decode_for(self._config, entry) for entry in entries]), self._config)


def decode_for(config: ViTConfig, entry: ImageEntry) -> Tensor:
    """The image as bytes [C, S, S], as a network wants it."""
    resizing = Resizing(target=config.image_resize, resample=config.image_resample)
    return decode(entry, config.image_size, config.num_channels, resizing)


def normalized(images: Tensor, config: ViTConfig) -> Tensor:
    """Bytes [B, C, S, S] as numbers that the network was trained with."""
    mean, deviation = (
        torch.tensor(each, device=images.device).view(-1, 1, 1) for each in (config.image_mean, config.image_std)
    )
    return (images.float() / 255 - mean) / deviation


def augmented(images: Tensor, kinds: Sequence[str], seed: int, step: int, samples: Sequence[int]) -> Tensor:
    """Bytes [B, C, S, S], each mirrored at random and moved by up to an eighth of its side over black; a function of
    seed, step and the number of the sample, not of the batch around it."""
    size = images.shape[-1]
    reach = size // 8 if "crop" in kinds else 0
    padded = functional.pad(images, (reach,) * 4)
    found = torch.empty_like(images)
    for row, sample in enumerate(samples):
        draw = torch.randint(0, 2**31, (3,), generator=seeds.generator(seed, "augment", step, sample)).tolist()
        top, left = (number % (2 * reach + 1) for number in draw[:2])
        image = padded[row, :, top : top + size, left : left + size]
        found[row] = image.flip(-1) if "flip" in kinds and draw[2] % 2 else image
    return found
