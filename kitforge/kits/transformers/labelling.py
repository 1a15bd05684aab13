"""What the tasks share that put a linear head on a language model: options, rows with labels, the head, and the loss.

B rows, T tokens, C labels.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from kitforge.core.checkpoint.hugging_face import CONFIG, read_folder
from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.kernels.dispatch import CompileLevel
from kitforge.core.nn.causal_lm import CausalLM, padded_context
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.nn.encoder import Encoder
from kitforge.core.nn.score_head import BACKBONE, HEAD, POOLER, ScoreModel, initial_head
from kitforge.core.parallel.rendezvous import Rendezvous
from kitforge.data.features import class_names, named
from kitforge.data.labels import ProblemType
from kitforge.data.source import open_rows
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.dtype import ExportDtype, LoadDtype
from kitforge.foundation.errors import ConfigError, DataError, ModelError
from kitforge.foundation.log import logger
from kitforge.foundation.types import OnInvalid
from kitforge.kits.kit import Prepared, RunInputs, expect_network
from kitforge.kits.language_model import ADAPTER, TokenizedOptions, check_whole_rows
from kitforge.kits.network_source import HeadSource, NetworkSource, find_run_tokenizer
from kitforge.kits.transformers.rows import ClassifierTask, RowOptions, RowSplits, fitting_tokens
from kitforge.kits.transformers.text_kit import TextKit, row_corpus
from kitforge.models import loading as model_folder
from kitforge.models.catalog import without_head
from kitforge.models.classifier_heads import SEQUENCE_CLASSIFIER
from kitforge.models.hub import resolve
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.models.peft import base_of, is_adapter, merge_adapter, read_head
from kitforge.trainer.run_folder import Run

TargetT = TypeVar("TargetT")
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRowOptions(RowOptions):
    """Rows with texts; their columns are those of the task."""

    on_too_long: Literal["refuse", "cut_right"] = "refuse"  # rows of more tokens: refuse, or drop the last ones
    on_invalid: OnInvalid = "refuse"  # rows without a text or words, or without what is to be learned of them


@dataclass(frozen=True, slots=True, kw_only=True)
class LabellingOptions(TokenizedOptions, ABC):
    """Options of a task with a head over labels; its `data` are those of the task."""

    # null: that of the checkpoint; else of several labels a row where all labels are lists. regression: numbers.
    problem_type: ProblemType | None = None
    # in the order of the logits; null: those of the checkpoint, else of the training rows
    labels: tuple[str | int | bool, ...] = ()
    format: Literal["huggingface", "onnx", "torch_export"] = "huggingface"  # of `export`

    def __post_init__(self) -> None:
        TokenizedOptions.__post_init__(self)
        least = 1 if self.problem_type == "regression" else 2
        is_sound = len(set(self.labels)) == len(self.labels) and (not self.labels or len(self.labels) >= least)
        check(is_sound, "labels", list(self.labels), "two or more, all distinct; one with problem_type=regression")
        check_whole_rows(self.parallel)


def read_labelled_rows(
    spec: object,
    read: Callable[[object, object], tuple[list[int], TargetT]],
    data: TextRowOptions,
    columns: Sequence[str],
) -> tuple[list[tuple[object, list[int], TargetT]], list[str]]:
    """Location, tokens and target of every row; see `read_text_rows`."""

    def read_one(row: object, location: object) -> tuple[list[list[int]], TargetT]:
        tokens, target = read(row, location)
        return [tokens], target

    found, declared = read_text_rows(spec, read_one, data, columns)
    return [(location, tokens, target) for location, (tokens,), target in found], declared


def read_text_rows(
    spec: object,
    read: Callable[[object, object], tuple[list[list[int]], TargetT]],
    data: TextRowOptions,
    columns: Sequence[str] = (),
) -> tuple[list[tuple[object, list[list[int]], TargetT]], list[str]]:
    """Location, tokens of each text and target of every row; `read` gives the latter two of a row and its location, and
    raises DataError for one that cannot be used. And the names that ClassLabel gives to the numbers of the first of
    `columns` that there is, in whose place the rows have these names."""
    found: list[tuple[object, list[list[int]], TargetT]] = []
    num_skipped, num_cut, declared = 0, 0, dict[str, None]()
    for location, row, column, names in _class_rows(spec, columns):
        declared |= dict.fromkeys(names)
        try:
            plain = {**row, column: named(row[column], names, location)} if names else row
            texts, target = read(plain, location)
        except DataError:
            if data.on_invalid == "refuse":
                raise
            num_skipped += 1
            continue
        longest = max(map(len, texts))
        if longest > data.sequence_length and data.on_too_long == "refuse":
            got, expected = f"{longest} tokens", f"at most data.sequence_length={data.sequence_length}"
            fix = "raise data.sequence_length, or add data.on_too_long=cut_right"
            raise DataError(f"{location} is too long", got=got, expected=expected, fix=fix)
        num_cut += longest > data.sequence_length
        found.append((location, [tokens[: data.sequence_length] for tokens in texts], target))
    if spec is not None and not found:
        raise DataError("there are no rows to learn from", got=f"{num_skipped} unusable ones", expected="at least one")
    if num_skipped or num_cut:
        _log.warning("%d rows: %d more were skipped, %d were cut", len(found), num_skipped, num_cut)
    return found, list(declared)


def _class_rows(spec: object, columns: Sequence[str]) -> Iterator[tuple[object, Any, str, tuple[str, ...]]]:
    """Every row with its location, and the column of a ClassLabel with its names."""
    for shard in open_rows(spec) if spec is not None else ():
        column, names = class_names(shard.features, columns)
        yield from ((location, row, column, names) for location, row in shard.rows())


class HeadedModel(ScoreModel, ABC):
    """A network with a linear head [C, dim]; `logits_at` is its forward pass in training."""

    has_bias, pools_encoders, fsdp_root = False, False, "logits_at"

    def __init__(
        self, backbone: nn.Module, labels: Sequence[str], problem_type: ProblemType = "single_label_classification"
    ) -> None:
        pools = self.pools_encoders and isinstance(backbone, Encoder)
        rate = cast(Encoder, backbone).config.decoder().embedding_dropout if pools else None
        super().__init__(backbone, len(labels), has_bias=self.has_bias or pools, pooler_dropout=rate)
        self.labels, self.problem_type = tuple(labels), problem_type
        # The padding token of a published folder; False: that of the tokenizer.
        self.pad_id: int | None | Literal[False] = False

    @abstractmethod
    def logits_at(self, *inputs: Any) -> Tensor:
        """Logits [B, C], or [B T, C] of all tokens, of the inputs of the task."""

    def paired_context(
        self, tokens: Tensor, sizes: Tensor, firsts: Tensor | None, dropout: DropoutKey | None = None
    ) -> Context:
        """The context of rows of tokens [B, T] of these sizes [B], whose second texts begin at `firsts` [B] (None:
        there are none): of another type to an encoder that has several."""
        context = padded_context(self.language_model, tokens, sizes, dropout)
        if firsts is None or not isinstance(self.backbone, Encoder) or self.backbone.config.num_token_types < 2:
            return context
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return dataclasses.replace(context, token_types=(positions >= firsts.to(tokens.device).unsqueeze(1)).long())


class SequenceClassifier(HeadedModel):
    """A network with a linear head [C, dim] on the output of a row's last token, or of an encoder behind a pooler on
    that of the first one, as `*ForSequenceClassification` of transformers."""

    pools_encoders = True

    def logits_at(
        self,
        tokens: Tensor,
        ends: Tensor,
        sizes: Tensor,
        dropout: DropoutKey | None = None,
        firsts: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, C] of rows [B, T] of these sizes [B], which a decoder classifies by those at `ends` [B]. `firsts`:
        where the second texts of pairs begin [B]."""
        return self.pooled_scores(tokens, self.paired_context(tokens, sizes, firsts, dropout), ends).float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, C] of rows [B, T] without padding."""
        sizes = torch.full((len(tokens),), tokens.shape[1], device=tokens.device)
        return self.logits_at(tokens, sizes - 1, sizes)


class TokenClassifier(HeadedModel):
    """A decoder with a linear head [C, dim] and bias on the output of every token, as `*ForTokenClassification` of
    transformers."""

    has_bias = True

    def logits_at(self, tokens: Tensor, sizes: Tensor | None = None, dropout: DropoutKey | None = None) -> Tensor:
        """Logits [B T, C] of rows [B, T] of these numbers of tokens [B] (None: T), one row after another: no view,
        which FSDP cannot hook."""
        sizes = torch.full((len(tokens),), tokens.shape[1]) if sizes is None else sizes
        return self.pooled_scores(tokens, padded_context(self.language_model, tokens, sizes, dropout)).float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, C] of rows [B, T]."""
        return torch.unflatten(self.logits_at(tokens), 0, tokens.shape)


Inputs: TypeAlias = RunInputs[Tokenizer]
HeadedOptionsT = TypeVar("HeadedOptionsT", bound=LabellingOptions)
HeadedModelT = TypeVar("HeadedModelT", bound=HeadedModel)


class LabellingPipeline(ABC, Generic[HeadedModelT]):
    """Labels texts by a head, in the shapes of Hugging Face's pipelines."""

    def __init__(self, model: HeadedModelT, tokenizer: Tokenizer, options: LabellingOptions) -> None:
        self._model, self._tokenizer = model.eval(), tokenizer
        self._fitting = partial(fitting_tokens, model.language_model.geometry.max_length, options.data.on_too_long)

    @abstractmethod
    def __call__(self, texts: str | Sequence[str]) -> list[Any]:
        """What the labels say of a text, or of each of several."""

    @abstractmethod
    def predictions(self, values: Sequence[Any]) -> Iterable[dict[str, Any]]:
        """The columns that `predict` adds to rows with these texts or lists of words."""


class LabellingKit(TextKit[HeadedOptionsT]):
    """A kit of a head on a language model."""

    MODEL: type[HeadedModel]
    TASK: type[ClassifierTask]
    SUFFIX: str  # of the class in transformers
    # Reads rows: train, evaluation, tokenizer, options, and the labels of the options or of the checkpoint.
    READ: Callable[..., RowSplits[Any]]
    PIPELINE: type[LabellingPipeline[Any]]
    LABELLED: str  # in messages
    TEXTS: tuple[str, ...] = ()  # the options that name the columns of texts; COLUMN's alone where there are none

    def prepare(
        self, options: HeadedOptionsT, inputs: Inputs, rendezvous: Rendezvous, *, is_evaluation: bool
    ) -> Prepared[HeadedOptionsT, Tokenizer]:
        train, evaluation = self.required_datasets(options, inputs, "labelled rows", is_evaluation=is_evaluation)
        given = inputs.model
        if given is not None and not isinstance(given, (HeadedModel, CausalLM)):
            expected = "a language model or a classifier"
            raise ModelError("this network cannot label texts", got=type(given).__name__, expected=expected)
        backbone = given.backbone if isinstance(given, HeadedModel) else given
        source = NetworkSource.find(
            options, dataclasses.replace(inputs, model=backbone), self.open_model, is_evaluation=is_evaluation
        )
        columns = {getattr(options.data, name) for name in self.TEXTS or (self.COLUMN,)}
        tokenizer = find_run_tokenizer(options, inputs.processor, lambda: row_corpus(train, columns))
        source, stored = source.fitted(tokenizer, self.KIND, *self.FURTHER_KINDS), source.unverified
        if given is None:
            # The head of the language model is never used, so none is built.
            source = dataclasses.replace(source, config=without_head(source.family))
        own = given.labels if isinstance(given, HeadedModel) else ()
        known = own or (stored.labels if stored is not None and HEAD in stored.head else ())
        if is_evaluation and not known:
            raise ModelError("this model has no labels yet", fix=f"train it first: task={options.task}")
        found, reading = stored if given is None else given, options
        if options.problem_type is None and known:
            kind = getattr(found, "problem_type", None)
            # As in transformers, a single output that is not said to be a label is a number.
            is_number = len(known) == 1 and kind != "multi_label_classification"
            reading = dataclasses.replace(options, problem_type="regression" if is_number else kind)
        # Other labels than those of the checkpoint begin with a new head.
        data = self.READ(train, evaluation, tokenizer, reading, options.labels or known)
        head = HeadSource(
            wrap=partial(self._with_head, given, data),
            tensors=partial(_head_tensors, given, known == data.labels, options.seed),
        )
        task = partial(self.TASK, options, data, partial(source.build, head=head))
        labels = {"labels": list(data.labels), "problem_type": data.problem_type}
        prepared = self.prepared(options, source, tokenizer, data.fingerprint, task)
        return dataclasses.replace(prepared, recorded=prepared.recorded | labels)

    def dry_labels(self, options: HeadedOptionsT) -> list[Any]:
        """The labels of rows that stand in for data: those of the options, else two."""
        labels: list[Any] = list(options.labels) or ["0", "1"]
        if options.problem_type == "regression":
            return [[0.5] * len(labels) if options.labels else 0.5]
        return [[each] for each in labels] if options.problem_type == "multi_label_classification" else labels

    def adapted(self, model: nn.Module) -> tuple[nn.Module, str, Mapping[str, Tensor] | None]:
        network = cast(HeadedModel, model)
        return network.backbone, ADAPTER, {name: network.get_parameter(name) for name in _names_of_head(network)}

    def _with_head(self, given: nn.Module | None, data: RowSplits[Any], backbone: nn.Module) -> HeadedModel:
        """The classifier that was handed over, or one with another head on the network."""
        if not isinstance(given, HeadedModel) or given.labels != data.labels:
            return self.MODEL(backbone, data.labels, data.problem_type)
        given.problem_type = data.problem_type
        return given.to(cast(CausalLM, backbone).head_weight.device)

    def load(
        self, folder: Path, device: torch.device, level: CompileLevel = "O1", dtype: LoadDtype = "fp32"
    ) -> nn.Module:
        stored = self.open_model(folder)
        if HEAD not in stored.head:
            raise ModelError("there is no classifier here", got=folder, expected=f"a run of {self.OPTIONS().task}")
        model = self.MODEL(model_folder.load_stored(stored, device=device, level=level, dtype=dtype), stored.labels)
        model.problem_type, model.pad_id = stored.problem_type, False if stored.is_run else stored.pad_id
        for name in _names_of_head(model):
            if name not in stored.head:
                fix = "train it further, which begins with a new one"
                raise ModelError("a part of the classifier is missing", got=folder, expected=name, fix=fix)
            model.get_parameter(name).data.copy_(stored.head[name])
        return model

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """The model of a folder, with head and labels where it is a classifier's; no weight is read yet."""
        return _open_headed(folder, self.SUFFIX, open_run)

    def open_pipeline(self, model: nn.Module, processor: Tokenizer, options: HeadedOptionsT) -> LabellingPipeline[Any]:
        expected = f"the model of a run of {self.OPTIONS().task}"
        network = expect_network(model, self.MODEL, f"this model does not label {self.LABELLED}", expected)
        return self.PIPELINE(network, processor, options)

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
        """Write the Hugging Face folder of the task's class in transformers, from the folder of a run."""
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, nn.Module):
            raise ConfigError("a classifier is exported from its folder", fix="pass the Run or its folder instead")
        super().save(home, folder, processor, dtype)


def _head_tensors(
    given: nn.Module | None, is_kept: bool, seed: int, model: nn.Module, stored: StoredModel | None
) -> dict[str, Tensor]:
    """The stored head where it is kept, or a new one; none for the classifier that was handed over."""
    if model is given:
        return {}
    assert isinstance(model, HeadedModel)
    size, dim = len(model.labels), model.language_model.geometry.dim
    rows = {HEAD: size, POOLER: dim}
    first = {name: initial_head(count, dim, seed, name=name) for name, count in rows.items()}
    first |= {name.replace("weight", "bias"): torch.zeros(count) for name, count in rows.items()}
    # A pooler is that of any labels.
    old = {} if stored is None else {name: each for name, each in stored.head.items() if is_kept or "pooler" in name}
    return {name: old.get(name, first[name]) for name in _names_of_head(model)}


def _names_of_head(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if not name.startswith(BACKBONE)]


def _open_headed(folder: Path, suffix: str, open_run: OpenCheckpoint) -> StoredModel:
    """The classifier of a run, a step or a Hugging Face folder, with its head and labels; else the language model that
    lies there. No weight is read yet."""
    if is_adapter(folder):
        base = resolve(base_of(folder))
        return _open_adapted(folder, base, _open_headed(base, suffix, open_run), suffix)
    checkpoint = open_run(folder) if folder.is_dir() else None
    if checkpoint is not None and HEAD in checkpoint.names("model") and checkpoint.state["config"].get("labels"):
        labels, stored = tuple(checkpoint.state["config"]["labels"]), model_folder.open_scored(checkpoint)
        kind = checkpoint.state["config"].get("problem_type") or stored.problem_type
        return dataclasses.replace(stored, labels=labels, suffix=suffix, problem_type=kind, is_run=True)
    if checkpoint is None and model_folder.labels_of(folder, suffix):
        return model_folder.open_classifier(folder, suffix)
    stored = model_folder.open_model(folder, lambda _folder: checkpoint)
    is_pooled = suffix == SEQUENCE_CLASSIFIER and checkpoint is None
    return dataclasses.replace(stored, head=model_folder.pooler_of(folder)) if is_pooled else stored


def _open_adapted(folder: Path, base: Path, stored: StoredModel, suffix: str) -> StoredModel:
    """An opened base model with the adapter of a PEFT folder, and the head that lies there. Its labels are those of the
    base where it has as many, else numbered."""
    read, head = merge_adapter(stored.config, stored.read, folder), read_head(folder)
    if HEAD not in head:
        return dataclasses.replace(stored, read=read, blocks={})
    labels, count = stored.labels, len(head[HEAD])
    # As of every classifier, without the head of a language model.
    config = without_head(stored.config)
    own = dict(model_folder.build_on_meta(config).named_parameters())
    pad_id = read_folder(base).config.get("pad_token_id") if (base / CONFIG).is_file() else None
    return dataclasses.replace(
        stored,
        read=read,
        config=config,
        names=tuple(name for name in stored.names if name in own),
        head={**stored.head, **head},
        labels=labels if len(labels) == count else tuple(f"LABEL_{number}" for number in range(count)),
        suffix=suffix,
        pad_id=pad_id if isinstance(pad_id, int) else stored.pad_id,
        blocks={},
    )
