"""The wiring of `image_classification`: from options and objects to a run, and from a folder to a pipeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.nn.vision import VisionTransformer
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.images import ImageEntry, find_images
from kitforge.foundation.config import to_dict
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import write_text
from kitforge.foundation.types import Region
from kitforge.kits.batch_predict import Predict, predict_rows
from kitforge.kits.kit import LoadModel, Prepared, RunInputs, datasets
from kitforge.kits.language_model import (
    export_language_model,
    save_language_model,
)
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import NetworkSource
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
from kitforge.kits.transformers.rows import probabilities
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.peft import base_of, is_adapter
from kitforge.models.vit.model import ViTConfig
from kitforge.trainer.run_folder import Run

Inputs: TypeAlias = RunInputs[ImageProcessor]
# Images that a pipeline computes at once.
_BATCH = 64


@final
class ImageClassification(NetworkKit[ImageClassificationOptions, ImageProcessor]):
    """The task `image_classification`. Its models say themselves how they want their images."""

    OPTIONS = ImageClassificationOptions
    KIND = "vision"
    PREDICTS_AS_TRAINED = True

    def prepare(
        self, options: ImageClassificationOptions, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[ImageClassificationOptions, ImageProcessor]:
        """Images, labels and network."""
        train, evaluation = datasets(options, inputs, is_evaluation=is_evaluation)
        if train is None and evaluation is None:
            raise ConfigError("there are no images", got="data.train=null", fix="add data.train=FOLDER")
        if inputs.model is not None and not isinstance(inputs.model, VisionTransformer):
            got, expected = type(inputs.model).__name__, "a vision transformer: vit"
            raise ModelError("this network reads no images", got=got, expected=expected)
        source = NetworkSource.find(options, inputs, open_vision, is_evaluation=is_evaluation)
        files = find_files(train, evaluation, options.data)
        known = cast(ViTConfig | None, source.config)
        labels = options.labels or files.labels(() if known is None else known.labels)
        values = {**options.model, "labels": labels} if known is None else {**to_dict(known), "labels": labels}
        if files.has_lists and known is None:
            values.setdefault("problem_type", "multi_label_classification")
        config: Any = config_of({"family": "vit", **values}, "vision")
        data = read_images(files, options, labels, config)
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

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder, with the normalization of its images; no weight is read yet."""
        return open_vision(folder, open_run)

    def find_processor(self, folder: Path) -> ImageProcessor:
        """What prepares images for the model of a folder."""
        return ImageProcessor(cast(Any, self.open_model(folder).config))

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
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


IMAGE_CLASSIFICATION = ImageClassification()
