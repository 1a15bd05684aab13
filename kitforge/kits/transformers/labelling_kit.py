"""The wiring of tasks with a head over labels: from options and objects to a run, and from a folder to a model."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.core.parallel.world import World
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.kits.kit import Prepared, RunInputs, datasets
from kitforge.kits.language_model import (
    ADAPTER,
    SaveAdapter,
    SaveTokenizer,
    export_language_model,
)
from kitforge.kits.network_kit import NetworkKit
from kitforge.kits.network_source import BACKBONE, HeadSource, NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.labelling import (
    HEAD,
    HEAD_BIAS,
    HeadedModel,
    HeadedTask,
    LabelledData,
    LabellingOptions,
    initial_head,
    sharding_of_classifier,
)
from kitforge.models import loading as model_folder
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run

Inputs: TypeAlias = RunInputs[Tokenizer]
HeadedOptionsT = TypeVar("HeadedOptionsT", bound=LabellingOptions)


class LabellingKit(NetworkKit[HeadedOptionsT, Tokenizer]):
    """A kit of a head on a language model."""

    PREDICTS_AS_TRAINED = True
    MODEL: type[HeadedModel]
    TASK: type[HeadedTask]
    SUFFIX: str  # of the class in transformers

    @abstractmethod
    def read_data(
        self, train: object, evaluation: object, tokenizer: Tokenizer, options: HeadedOptionsT, known: tuple[str, ...]
    ) -> LabelledData[Any]:
        """Read and tokenize labelled rows. `known` are the labels of the options or of the checkpoint."""

    def prepare(
        self, options: HeadedOptionsT, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[HeadedOptionsT, Tokenizer]:
        """Rows and labels, tokenizer and network."""
        train, evaluation = datasets(options, inputs, is_evaluation=is_evaluation)
        if train is None and evaluation is None:
            raise ConfigError("there are no labelled rows", got="data.train=null", fix="add data.train=ROWS.jsonl")
        given = inputs.model
        if given is not None and not isinstance(given, (HeadedModel, CausalLM)):
            expected = "a language model or a classifier"
            raise ModelError("this network cannot label texts", got=type(given).__name__, expected=expected)
        backbone = given.backbone if isinstance(given, HeadedModel) else given
        source = NetworkSource.find(
            options, dataclasses.replace(inputs, model=backbone), self.open_model, is_evaluation=is_evaluation
        )
        tokenizer = find_run_tokenizer(options, inputs.processor, None)
        source, stored = source.fitted(tokenizer), source.outlook
        if given is None:
            # The head of the language model is never used, so none is built. Every family's options have this field.
            tied: Any = dataclasses.replace(cast(Any, source.config), tie_embeddings=True)
            source = dataclasses.replace(source, config=tied)
        own = given.labels if isinstance(given, HeadedModel) else ()
        known = own or (stored.labels if stored is not None and HEAD in stored.head else ())
        if is_evaluation and not known:
            raise ModelError("this model has no labels yet", fix=f"train it first: task={options.task}")
        found, reading = stored if given is None else given, options
        if options.problem_type is None and known:
            reading = dataclasses.replace(options, problem_type=getattr(found, "problem_type", None))
        # Other labels than those of the checkpoint begin with a new head.
        data = self.read_data(train, evaluation, tokenizer, reading, options.labels or known)
        head = HeadSource(
            wrap=partial(self._with_head, given, data),
            sharding=sharding_of_classifier,
            tensors=partial(_head_tensors, given, known == data.labels, options.seed),
        )

        def task(world: World) -> tuple[HeadedTask, list[Callback]]:
            made = self.TASK(options, data, partial(source.build, head=head), world)
            return made, [SaveTokenizer(tokenizer), SaveAdapter(_adapted, options.checkpoint, tokenizer)]

        labels = {"labels": list(data.labels), "problem_type": data.problem_type}
        return Prepared(
            options=options,
            recorded=to_dict(options) | {"model": source.recorded()} | labels,
            fingerprints={"rows": data.fingerprint},
            processor=tokenizer,
            task=task,
        )

    def _with_head(self, given: nn.Module | None, data: LabelledData[Any], backbone: nn.Module) -> HeadedModel:
        """The classifier that was handed over, or one with another head on the network."""
        if not isinstance(given, HeadedModel) or given.labels != data.labels:
            return self.MODEL(backbone, data.labels, data.problem_type)
        given.problem_type = data.problem_type
        return given.to(cast(CausalLM, backbone).head_weight.device)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        """The classifier of a run folder, a step folder or a Hugging Face folder, adapters merged."""
        stored = self.open_model(folder)
        if HEAD not in stored.head:
            raise ModelError("there is no classifier here", got=folder, expected=f"a run of {self.OPTIONS().task}")
        model = self.MODEL(model_folder.load_stored(stored, device=device, level=level, dtype=dtype), stored.labels)
        model.problem_type, model.pad_id = stored.problem_type, False if stored.is_run else stored.pad_id
        for name, tensor in stored.head.items():
            model.get_parameter(name).data.copy_(tensor)
        return model

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder, with head and labels where it is a classifier's; no weight is read yet."""
        return _open_headed(folder, self.SUFFIX, open_run)

    def save(
        self,
        source: nn.Module | Run | Path,
        folder: Path,
        processor: Tokenizer | None,
        dtype: ExportDtype | None = None,
    ) -> None:
        """Write the Hugging Face folder of the task's class in transformers, from the folder of a run."""
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, nn.Module):
            raise ConfigError("a classifier is exported from its folder", fix="pass the Run or its folder instead")
        export_language_model(self.open_model(home), folder, processor, dtype)


def _head_tensors(
    given: nn.Module | None, is_kept: bool, seed: int, model: nn.Module, stored: StoredModel | None
) -> dict[str, Tensor]:
    """The stored head where it is kept, or a new one; none for the classifier that was handed over."""
    if model is given:
        return {}
    assert isinstance(model, HeadedModel)
    size = len(model.labels)
    first = {HEAD: initial_head(size, cast(CausalLM, model.backbone).geometry.dim, seed), HEAD_BIAS: torch.zeros(size)}
    old = stored.head if stored is not None and is_kept else {}
    return {name: old.get(name, first[name]) for name in (HEAD, HEAD_BIAS)[: 1 + model.has_bias]}


def _open_headed(folder: Path, suffix: str, open_run: OpenCheckpoint) -> StoredModel:
    """The classifier of a run, a step or a Hugging Face folder, with its head and labels; else the language model that
    lies there. No weight is read yet."""
    checkpoint = open_run(folder) if folder.is_dir() else None
    if checkpoint is not None and HEAD in checkpoint.names("model") and checkpoint.state["config"].get("labels"):
        labels, names = tuple(checkpoint.state["config"]["labels"]), checkpoint.names("model")
        head = {name: checkpoint.tensor(name) for name in (HEAD, HEAD_BIAS) if name in names}
        stored = model_folder.open_decoder(checkpoint, BACKBONE)
        kind = checkpoint.state["config"].get("problem_type") or stored.problem_type
        return dataclasses.replace(stored, head=head, labels=labels, suffix=suffix, problem_type=kind, is_run=True)
    if checkpoint is None and len(model_folder.labels_of(folder, suffix) or ()) > 1:
        return model_folder.open_classifier(folder, suffix)
    return model_folder.open_model(folder, lambda _folder: checkpoint)


def _adapted(model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
    """The adapted backbone, its adapter's name, and the head."""
    network = cast(HeadedModel, model)
    return network.backbone, ADAPTER, {f"score.{name}": each for name, each in network.score.named_parameters()}
