"""The wiring of tasks with a head over labels: from options and objects to a run, and from a folder to a model."""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.decoder import FamilyConfig
from kitforge.core.nn.init import init_weights
from kitforge.core.nn.lora import config_of as config_of_adapter
from kitforge.core.parallel.parallelize import parallel_model_of, parallelize
from kitforge.core.parallel.sharding import check_geometry
from kitforge.core.parallel.world import World
from kitforge.data.source import open_rows
from kitforge.data.tokenizer import ByteTokenizer, Tokenizer
from kitforge.foundation.config import check, to_dict
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.foundation.files import atomic_file
from kitforge.foundation.progress import show_progress
from kitforge.kits.kit import LoadModel, RunInputs
from kitforge.kits.language_model import (
    ADAPTER,
    LoraOptions,
    SaveAdapter,
    SaveTokenizer,
    export_language_model,
    freeze,
    load_weights,
    resolved_options,
    stored_tokenizer,
    with_adapter,
)
from kitforge.kits.transformers.labelling import (
    BACKBONE,
    HEAD,
    HEAD_BIAS,
    HeadedModel,
    HeadedTask,
    LabelledData,
    LabellingOptions,
    initial_head,
    sharding_of_classifier,
)
from kitforge.kits.transformers.network import check_fit, find_run_tokenizer, new_config, prepare
from kitforge.kits.transformers.row_kit import PreparedRows, RowKit
from kitforge.models import loading as model_folder
from kitforge.models.catalog import config_of, config_of_network
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.callbacks.callback import Callback
from kitforge.trainer.run_folder import Run

Inputs: TypeAlias = RunInputs[Tokenizer]
# Rows that are labelled at once.
_BATCH = 32
HeadedOptionsT = TypeVar("HeadedOptionsT", bound=LabellingOptions)


class LabellingKit(RowKit[HeadedOptionsT, Tokenizer]):
    """A kit of a head on a language model."""

    MODEL: type[HeadedModel]
    TASK: type[HeadedTask]
    SUFFIX: str  # of the class in transformers

    @abstractmethod
    def read_data(
        self, train: object, evaluation: object, tokenizer: Tokenizer, options: HeadedOptionsT, known: tuple[str, ...]
    ) -> LabelledData[Any]:
        """Read and tokenize labelled rows. `known` are the labels of the options or of the checkpoint."""

    def prepare(self, options: HeadedOptionsT, inputs: Inputs, *, is_evaluation: bool) -> _Prepared[HeadedOptionsT]:
        """Everything that can be read before any rank is started."""
        return _Prepared(self, options, inputs, is_evaluation=is_evaluation)

    def task(
        self,
        options: HeadedOptionsT,
        prepared: PreparedRows,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> HeadedTask:
        """The loss over the rows, of the network that `build` gives."""
        assert isinstance(prepared, _Prepared)
        return self.TASK(options, prepared.data, build, world)

    def callbacks(self, options: HeadedOptionsT, prepared: PreparedRows) -> list[Callback]:
        """The tokenizer and the adapter are kept with the run."""
        tokenizer = prepared.processor
        return [SaveTokenizer(tokenizer), SaveAdapter(_adapted, options.checkpoint, tokenizer)]

    def check_parallel(self, options: HeadedOptionsT) -> None:
        """Raise ConfigError for a network that the degrees of `options` cannot split; before any rank is started."""
        if options.checkpoint is None and options.model:
            size = options.model.get("vocab_size") or ByteTokenizer.vocab_size
            network = model_folder.build_on_meta(config_of({**options.model, "vocab_size": size}))
            check_geometry(sharding_of_network(network), network.geometry, options.parallel)

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

    def find_processor(self, folder: Path) -> Tokenizer:
        """The tokenizer that lies with a run, a step or a Hugging Face folder."""
        return stored_tokenizer(folder)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Tokenizer | None, dtype: ExportDtype | None
    ) -> None:
        """Write the Hugging Face folder of the task's class in transformers, from the folder of a run."""
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, nn.Module):
            raise ConfigError("a classifier is exported from its folder", fix="pass the Run or its folder instead")
        export_language_model(self.open_model(home), folder, processor, dtype)

    def resolved(self, options: HeadedOptionsT) -> dict[str, Any]:
        """All options, with the defaults of the model unless a checkpoint brings it."""
        return resolved_options(options, options.checkpoint, options.model, options.tokenizer)


@final
class _Prepared(Generic[HeadedOptionsT]):
    """Tokenizer, rows and labels of a run, and how its network is built."""

    def __init__(
        self, kit: LabellingKit[HeadedOptionsT], options: HeadedOptionsT, inputs: Inputs, *, is_evaluation: bool
    ) -> None:
        self._kit = kit
        self._options, self._given, self._is_evaluation = options, inputs.model, is_evaluation
        self._open = kit.open_model if inputs.open_model is None else inputs.open_model
        train = options.data.train if inputs.train_dataset is None else inputs.train_dataset
        evaluation = options.data.eval if inputs.eval_dataset is None else inputs.eval_dataset
        # An evaluation reads the training rows only if the evaluation rows are split off them.
        train = None if is_evaluation and evaluation is not None else train
        if train is None and evaluation is None:
            raise ConfigError("there are no labelled rows", got="data.train=null", fix="add data.train=ROWS.jsonl")
        stored = None
        if self._given is None and options.checkpoint is not None:
            stored = self._open(Path(options.checkpoint), partial(find_checkpoint, verify=False))
        elif options.lora.is_on and self._given is None:
            fix = "name a run, a folder, or a pretrained model: checkpoint=smollm2"
            raise ConfigError("an adapter needs a model to adapt", got=f"lora.rank={options.lora.rank}", fix=fix)
        self.processor = find_run_tokenizer(options, inputs.processor, None)
        self._config = self._network_config(stored)
        if self._config is not None:
            check_fit(self._config, options, self.processor)
        own = self._given.labels if isinstance(self._given, HeadedModel) else ()
        known = own or (stored.labels if stored is not None and HEAD in stored.head else ())
        if is_evaluation and not known:
            raise ModelError("this model has no labels yet", fix=f"train it first: task={options.task}")
        # Other labels than those of the checkpoint begin with a new head.
        labels = options.labels or known
        found = self._given if self._given is not None else stored
        if options.problem_type is None and known:
            kind = getattr(found, "problem_type", None)
            # As in transformers, a single output that is not said to be a label is a number.
            is_number = len(known) == 1 and kind != "multi_label_classification"
            options = dataclasses.replace(options, problem_type="regression" if is_number else kind)
        self.data: LabelledData[Any] = kit.read_data(train, evaluation, self.processor, options, labels)
        self._has_head = bool(known) and known == self.data.labels

    def recorded(self) -> dict[str, Any]:
        """The options of the model, and its labels, as a checkpoint records them."""
        model = {} if self._config is None else {"family": self._config.family, **to_dict(self._config)}
        return {"model": model, "labels": list(self.data.labels), "problem_type": self.data.problem_type}

    def build(self, world: World) -> nn.Module:
        """The classifier on the device, cut as the world's degrees say; with its adapter if it is to be trained."""
        options = self._options
        lora, frozen = (LoraOptions(), ()) if self._is_evaluation else (options.lora, options.freeze)
        if self._given is not None:
            return self._prepared(self._given_model(world), lora, frozen, world)
        assert self._config is not None
        # The head of the language model is never used, so none is built.
        model = self._kit.MODEL(
            model_folder.build_on_meta(self._config, options.compile_level), self.data.labels, self.data.problem_type
        )
        freeze(model, frozen)
        if lora.is_on:
            with_adapter(model.backbone, lora, options.seed)
        parallel = parallelize(model, sharding_of_classifier(model), world)
        parallel.materialize(world.device)
        head = None
        if options.checkpoint is not None:
            stored = self._open(Path(options.checkpoint), partial(find_checkpoint, world=world))
            load_weights(parallel, stored, lora, options.seed, BACKBONE)
            head = stored.head if self._has_head else None
        else:
            layers = self._config.num_layers
            for name, shard in parallel.parameters().items():
                own, region = name.removeprefix(BACKBONE), parallel.region(name)
                init_weights([(own, shard)], layers, options.seed, {own: region})
        shards = parallel.parameters()
        self._fill_head(model, {each: (parallel.region(each).of, shards[each]) for each in shards}, head)
        prepare(model.backbone, options)
        return model

    def _given_model(self, world: World) -> HeadedModel:
        """The classifier that was handed over, or a language model with a new head."""
        given = cast(nn.Module, self._given).to(world.device)
        if isinstance(given, HeadedModel) and given.labels == self.data.labels:
            given.problem_type = self.data.problem_type
            return given
        backbone = given.backbone if isinstance(given, HeadedModel) else given
        if not isinstance(backbone, CausalLM):
            expected = "a language model or a classifier"
            raise ModelError("this network cannot label texts", got=type(backbone).__name__, expected=expected)
        model = self._kit.MODEL(backbone, self.data.labels, self.data.problem_type)
        shards = {name: (lambda whole: whole, each.data) for name, each in model.named_parameters()}
        self._fill_head(model, shards, None)
        return model

    def _prepared(self, model: HeadedModel, lora: LoraOptions, frozen: tuple[str, ...], world: World) -> HeadedModel:
        freeze(model, frozen)
        if lora.is_on and config_of_adapter(model.backbone) is None:
            with_adapter(model.backbone, lora, self._options.seed)
        parallel_model_of(model, world, sharding_of_classifier(model))
        prepare(model.backbone, self._options)
        return model

    def _fill_head(
        self,
        model: HeadedModel,
        shards: Mapping[str, tuple[Callable[[Tensor], Tensor], Tensor]],
        stored: Mapping[str, Tensor] | None,
    ) -> None:
        """Write a stored head, or the first one; `shards` are the parameters with what cuts a whole tensor for them."""
        size, dim = len(self.data.labels), cast(CausalLM, model.backbone).geometry.dim
        first = {HEAD: initial_head(size, dim, self._options.seed), HEAD_BIAS: torch.zeros(size)}
        with torch.no_grad():
            for name in (HEAD, HEAD_BIAS)[: 1 + model.has_bias]:
                cut, shard = shards[name]
                shard.copy_(cut((stored or first).get(name, first[name])))

    def _network_config(self, stored: StoredModel | None) -> FamilyConfig | None:
        """The options of the backbone, its embeddings tied: the head of the language model is not built."""
        if self._given is not None:
            backbone = self._given.backbone if isinstance(self._given, HeadedModel) else self._given
            return config_of_network(backbone)
        config = new_config(self._options, self.processor) if stored is None else stored.config
        # Every family's options are a dataclass with this field.
        return cast(FamilyConfig, dataclasses.replace(cast(Any, config), tie_embeddings=True))


def predict_rows(
    options: LabellingOptions,
    text: str,
    load_model: LoadModel,
    open_labeller: Callable[[nn.Module, Tokenizer], Callable[[list[dict[str, Any]]], list[Any]]],
) -> Path:
    """Write each row of `data.eval` with what the labeller of a model and its tokenizer adds to it, a dict for each of
    some rows, to the jsonl file `output`. A row that is no dict is its column `text`."""
    if options.checkpoint is None or options.output is None or options.data.eval is None:
        fix = "add checkpoint=RUN data.eval=rows.jsonl output=labels.jsonl"
        raise ConfigError("labels need a model, a file of rows and a file for the labels", fix=fix)
    folder, target = Path(options.checkpoint).expanduser(), Path(options.output).expanduser()
    check(not target.exists(), "output", target, "a file that does not exist yet")
    label = open_labeller(load_model(options.checkpoint, options.device, "fp32"), stored_tokenizer(folder))
    with atomic_file(target) as file, show_progress("rows labelled", enabled=options.trainer.progress) as progress:
        done = 0
        for shard in open_rows(options.data.eval):
            rows = [dict(row) if isinstance(row, Mapping) else {text: row} for _, row in shard.rows()]
            for start in range(0, len(rows), _BATCH):
                part = rows[start : start + _BATCH]
                for row, each in zip(part, label(part), strict=True):
                    file.write(json.dumps(row | each, ensure_ascii=False).encode() + b"\n")
                done += len(part)
                progress(done)
    return target


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
    if checkpoint is None and model_folder.labels_of(folder, suffix):
        return model_folder.open_classifier(folder, suffix)
    return model_folder.open_model(folder, lambda _folder: checkpoint)


def _adapted(model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
    """The adapted backbone, its adapter's name, and the head."""
    network = cast(HeadedModel, model)
    return network.backbone, ADAPTER, {f"score.{name}": each for name, each in network.score.named_parameters()}
