"""The wiring of `text_classification`: from options and objects to a run, and from a folder to a pipeline."""

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
from kitforge.foundation.errors import ConfigError, DataError, ModelError
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
from kitforge.kits.transformers.classification import (
    BACKBONE,
    HEAD,
    LabelledData,
    SequenceClassifier,
    TextClassificationOptions,
    TextClassificationTask,
    encode_text,
    initial_head,
    read_data,
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
# Rows that a pipeline computes at once.
_BATCH = 32


@final
class TextClassification(RowKit[TextClassificationOptions, Tokenizer]):
    """The task `text_classification`."""

    OPTIONS = TextClassificationOptions

    def prepare(self, options: TextClassificationOptions, inputs: Inputs, *, is_evaluation: bool) -> _Prepared:
        """Everything that can be read before any rank is started."""
        return _Prepared(options, inputs, is_evaluation=is_evaluation)

    def task(
        self,
        options: TextClassificationOptions,
        prepared: PreparedRows,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> TextClassificationTask:
        """The loss over the rows, of the network that `build` gives."""
        assert isinstance(prepared, _Prepared)
        return TextClassificationTask(options, prepared.data, build, world)

    def callbacks(self, options: TextClassificationOptions, prepared: PreparedRows) -> list[Callback]:
        """The tokenizer and the adapter are kept with the run."""
        tokenizer = prepared.processor
        return [SaveTokenizer(tokenizer), SaveAdapter(_adapted, options.checkpoint, tokenizer)]

    def check_parallel(self, options: TextClassificationOptions) -> None:
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
            raise ModelError("there is no classifier here", got=folder, expected="a run of text_classification")
        model = SequenceClassifier(
            model_folder.load_stored(stored, device=device, level=level, dtype=dtype), stored.labels
        )
        model.score.weight.data.copy_(stored.head[HEAD])
        return model

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder, with head and labels where it is a classifier's; no weight is read yet."""
        return open_classifier(folder, open_run)

    def find_processor(self, folder: Path) -> Tokenizer:
        """The tokenizer that lies with a run, a step or a Hugging Face folder."""
        return stored_tokenizer(folder)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Tokenizer | None, dtype: ExportDtype | None
    ) -> None:
        """Write the Hugging Face folder of a `*ForSequenceClassification`, from the folder of a run."""
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, nn.Module):
            raise ConfigError("a classifier is exported from its folder", fix="pass the Run or its folder instead")
        export_language_model(self.open_model(home), folder, processor, dtype)

    def open_pipeline(
        self, model: nn.Module, processor: Tokenizer, options: TextClassificationOptions
    ) -> TextClassificationPipeline:
        """What labels texts."""
        return TextClassificationPipeline(model, processor, options)

    def predict_file(self, options: TextClassificationOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with `predicted_label` and `score` to the jsonl file `output`."""
        if options.checkpoint is None or options.output is None or options.data.eval is None:
            fix = "add checkpoint=RUN data.eval=rows.jsonl output=labels.jsonl"
            raise ConfigError("labels need a model, a file of rows and a file for the labels", fix=fix)
        folder, target = Path(options.checkpoint).expanduser(), Path(options.output).expanduser()
        check(not target.exists(), "output", target, "a file that does not exist yet")
        model = load_model(options.checkpoint, options.device, "fp32")
        classify = self.open_pipeline(model, stored_tokenizer(folder), options)
        with (
            atomic_file(target) as file,
            show_progress("rows labelled", enabled=options.trainer.progress) as progress,
        ):
            done = 0
            for shard in open_rows(options.data.eval):
                rows = [dict(row) if isinstance(row, Mapping) else {options.data.text: row} for _, row in shard.rows()]
                for start in range(0, len(rows), _BATCH):
                    part = rows[start : start + _BATCH]
                    found = classify([str(row[options.data.text]) for row in part])
                    for row, each in zip(part, found, strict=True):
                        labelled = row | {"predicted_label": each["label"], "score": each["score"]}
                        file.write(json.dumps(labelled, ensure_ascii=False).encode() + b"\n")
                    done += len(part)
                    progress(done)
        return target

    def resolved(self, options: TextClassificationOptions) -> dict[str, Any]:
        """All options, with the defaults of the model unless a checkpoint brings it."""
        return resolved_options(options, options.checkpoint, options.model, options.tokenizer)

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=ROWS.jsonl output=LABELS.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=ROWS.jsonl",
        ]


@final
class TextClassificationPipeline:
    """Labels texts, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: TextClassificationOptions) -> None:
        if not isinstance(model, SequenceClassifier):
            expected = "the model of a run of text_classification"
            raise ModelError("this model does not label texts", got=type(model).__name__, expected=expected)
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._cuts = options.data.on_too_long == "cut_right"
        self._longest = cast(CausalLM, model.backbone).geometry.max_length

    @torch.no_grad()
    def __call__(self, texts: str | Sequence[str], top_k: int | None = 1) -> list[Any]:
        """`{"label", "score"}` of each text, in order; of a single text, a list of one. With another `top_k` a list of
        that many for each, the most probable first; None: of all labels. Raises DataError for a text that is longer
        than the model's context, or without tokens."""
        rows = [texts] if isinstance(texts, str) else list(texts)
        tokens = [encode_text(self._tokenizer, text) for text in rows]
        for number, each in enumerate(tokens):
            fits, got = len(each) <= self._longest or self._cuts, f"{len(each)} tokens"
            fix = "shorten it, or add data.on_too_long=cut_right"
            if not (fits and each):
                message = f"text {number} does not fit into the model"
                raise DataError(message, got=got, expected=f"1 to {self._longest}", fix=fix)
        found: list[Any] = [None] * len(rows)
        order = sorted(range(len(rows)), key=lambda row: -len(tokens[row]))
        for start in range(0, len(order), _BATCH):
            part = order[start : start + _BATCH]
            for row, scores in zip(part, self._probabilities([tokens[row] for row in part]), strict=True):
                chosen = scores.topk(min(top_k or len(scores), len(scores)))
                labels = [self._model.labels[index] for index in chosen.indices.tolist()]
                ranked = [
                    {"label": label, "score": score}
                    for label, score in zip(labels, chosen.values.tolist(), strict=True)
                ]
                found[row] = ranked[0] if top_k == 1 else ranked
        return found

    def _probabilities(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """[B, C] on the CPU."""
        device = self._model.score.weight.device
        cut = [row[: self._longest] for row in rows]
        tokens = torch.zeros(len(cut), max(map(len, cut)), dtype=torch.int64)
        for number, row in enumerate(cut):
            tokens[number, : len(row)] = torch.tensor(row)
        ends = torch.tensor([len(row) - 1 for row in cut])
        return self._model.logits_at(tokens.to(device), ends.to(device)).softmax(-1).cpu()


@final
class _Prepared:
    """Tokenizer, rows and labels of a run, and how its network is built."""

    def __init__(self, options: TextClassificationOptions, inputs: Inputs, *, is_evaluation: bool) -> None:
        self._options, self._given, self._is_evaluation = options, inputs.model, is_evaluation
        self._open = open_classifier if inputs.open_model is None else inputs.open_model
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
        own = self._given.labels if isinstance(self._given, SequenceClassifier) else ()
        known = own or (stored.labels if stored is not None and HEAD in stored.head else ())
        if is_evaluation and not known:
            raise ModelError("this model has no labels yet", fix="train it first: task=text_classification")
        # Other labels than those of the checkpoint begin with a new head.
        self.data: LabelledData = read_data(train, evaluation, self.processor, options, options.labels or known)
        self._has_head = bool(known) and known == self.data.labels

    def recorded(self) -> dict[str, Any]:
        """The options of the model, and its labels, as a checkpoint records them."""
        model = {} if self._config is None else {"family": self._config.family, **to_dict(self._config)}
        return {"model": model, "labels": list(self.data.labels)}

    def build(self, world: World) -> nn.Module:
        """The classifier on the device, cut as the world's degrees say; with its adapter if it is to be trained."""
        options = self._options
        lora, frozen = (LoraOptions(), ()) if self._is_evaluation else (options.lora, options.freeze)
        if self._given is not None:
            return self._prepared(self._given_model(world), lora, frozen, world)
        assert self._config is not None
        # The head of the language model is never used, so none is built.
        model = SequenceClassifier(model_folder.build_on_meta(self._config, options.compile_level), self.data.labels)
        freeze(model, frozen)
        if lora.is_on:
            with_adapter(model.backbone, lora, options.seed)
        parallel = parallelize(model, sharding_of_classifier(model), world)
        parallel.materialize(world.device)
        head = None
        if options.checkpoint is not None:
            stored = self._open(Path(options.checkpoint), partial(find_checkpoint, world=world))
            load_weights(parallel, stored, lora, options.seed, BACKBONE)
            head = stored.head[HEAD] if self._has_head else None
        else:
            layers = self._config.num_layers
            for name, shard in parallel.parameters().items():
                own, region = name.removeprefix(BACKBONE), parallel.region(name)
                init_weights([(own, shard)], layers, options.seed, {own: region})
        self._fill_head(model, parallel.region(HEAD).of, parallel.parameters()[HEAD], head)
        prepare(model.backbone, options)
        return model

    def _given_model(self, world: World) -> SequenceClassifier:
        """The classifier that was handed over, or a language model with a new head."""
        given = cast(nn.Module, self._given).to(world.device)
        if isinstance(given, SequenceClassifier) and given.labels == self.data.labels:
            return given
        backbone = given.backbone if isinstance(given, SequenceClassifier) else given
        if not isinstance(backbone, CausalLM):
            expected = "a language model or a classifier"
            raise ModelError("this network cannot label texts", got=type(backbone).__name__, expected=expected)
        model = SequenceClassifier(backbone, self.data.labels)
        self._fill_head(model, lambda whole: whole, model.score.weight.data, None)
        return model

    def _prepared(
        self, model: SequenceClassifier, lora: LoraOptions, frozen: tuple[str, ...], world: World
    ) -> SequenceClassifier:
        freeze(model, frozen)
        if lora.is_on and config_of_adapter(model.backbone) is None:
            with_adapter(model.backbone, lora, self._options.seed)
        parallel_model_of(model, world, sharding_of_classifier(model))
        prepare(model.backbone, self._options)
        return model

    def _fill_head(self, model: SequenceClassifier, region: Any, shard: Tensor, head: Tensor | None) -> None:
        dim = cast(CausalLM, model.backbone).geometry.dim
        whole = initial_head(len(self.data.labels), dim, self._options.seed) if head is None else head
        with torch.no_grad():
            shard.copy_(region(whole))

    def _network_config(self, stored: StoredModel | None) -> FamilyConfig | None:
        """The options of the backbone, its embeddings tied: the head of the language model is not built."""
        if self._given is not None:
            backbone = self._given.backbone if isinstance(self._given, SequenceClassifier) else self._given
            return config_of_network(backbone)
        config = new_config(self._options, self.processor) if stored is None else stored.config
        # Every family's options are a dataclass with this field.
        return cast(FamilyConfig, dataclasses.replace(cast(Any, config), tie_embeddings=True))


def open_classifier(folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
    """The classifier of a run, a step or a Hugging Face folder, with its head and labels; else the language model that
    lies there. No weight is read yet."""
    checkpoint = open_run(folder) if folder.is_dir() else None
    if checkpoint is not None and HEAD in checkpoint.names("model") and checkpoint.state["config"].get("labels"):
        labels, head = tuple(checkpoint.state["config"]["labels"]), {HEAD: checkpoint.tensor(HEAD)}
        return dataclasses.replace(model_folder.open_decoder(checkpoint, BACKBONE), head=head, labels=labels)
    if checkpoint is None and len(model_folder.labels_of(folder) or ()) > 1:
        return model_folder.open_classifier(folder)
    return model_folder.open_model(folder, lambda _folder: checkpoint)


def _adapted(model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
    """The adapted backbone, its adapter's name, and the head."""
    network = cast(SequenceClassifier, model)
    return network.backbone, ADAPTER, {HEAD: network.score.weight}
