"""The task `text_classification`: options, labelled rows, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.context import DropoutKey
from kitforge.data.document_shard import column_value, document_of, fingerprint_of
from kitforge.data.labels import (
    Label,
    ProblemType,
    head_labels,
    index_of,
    label_index,
    multi_hot,
    number_names,
    numbers_of,
)
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ConfigError, DataError
from kitforge.foundation.types import IGNORED, MicroBatch, Sums
from kitforge.inference.server.options import HttpOptions
from kitforge.inference.server.scores import ScoreService
from kitforge.kits.transformers.labelling import (
    LabellingKit,
    LabellingOptions,
    LabellingPipeline,
    SequenceClassifier,
    TextRowOptions,
    read_labelled_rows,
)
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.rows import (
    ClassifierTask,
    RaggedTokens,
    RowSplits,
    SplitRows,
    hold_out,
    label_probabilities,
    last_token,
)
from kitforge.kits.transformers.text_kit import PIPELINE_ROWS
from kitforge.models.classifier_heads import SEQUENCE_CLASSIFIER
from kitforge.report.notebook import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationDataOptions(TextRowOptions):
    """Texts and labels."""

    text: str = "text"  # column of the text
    label: str = "label"  # column of the label: a text or a whole number; a list of them; the numbers of a regression


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassificationOptions(LabellingOptions):
    """All options of the task."""

    task: str = "text_classification"
    data: ClassificationDataOptions = field(default_factory=ClassificationDataOptions)
    port: int = 8000  # port of `serve`; 0: any free port
    serve: HttpOptions = field(default_factory=HttpOptions)


class LabelledRows(SplitRows):
    """Tokenized rows in memory, and a label for each."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], Any]], pad_id: int, problem_type: ProblemType) -> None:
        self._pad_id = pad_id
        self._ends = np.array([last_token(tokens, pad_id) for tokens, _ in rows], np.int64)
        self._tokens = RaggedTokens(tokens for tokens, _ in rows)
        self.lengths = self._tokens.lengths
        is_single = problem_type == "single_label_classification"
        self.labels = np.array([label for _, label in rows], np.int64 if is_single else np.float32)
        self.fingerprint = fingerprint_of(*self._tokens.identity(), self.labels.tobytes())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], the position of the token
        that classifies a row to a decoder `ends` [B], numbers of tokens `sizes` [B], labels [B], or zeros and ones or
        numbers [B, C], and weights [B]. Without rows, one of weight 0."""
        tokens = self._tokens.padded(rows, self._pad_id)
        if not len(rows):
            empty = torch.zeros(1, dtype=torch.int64)
            labels = torch.from_numpy(np.zeros((1, *self.labels.shape[1:]), self.labels.dtype))
            return {"tokens": tokens, "ends": empty, "sizes": empty + 1, "labels": labels, "weights": empty.float()}
        return {
            "tokens": tokens,
            "ends": torch.from_numpy(self._ends[rows]),
            "sizes": torch.from_numpy(self.lengths[rows]),
            "labels": torch.from_numpy(self.labels[rows]),
            "weights": torch.ones(len(rows)),
        }


def read_data(
    train: object, evaluation: object, tokenizer: Tokenizer, options: TextClassificationOptions, known: tuple[str, ...]
) -> RowSplits[LabelledRows]:
    """Read and tokenize labelled rows. `known` are the labels of the options or of the checkpoint; without them they
    are those of the training rows, in order. Raises DataError naming the row of a text or label that is unusable."""
    data = options.data

    def read(row: object, location: object) -> tuple[list[int], Label]:
        text, label = _columns(row, options, location)
        return tokenizer.encode_prompt(text), label

    # The numbers of a regression are no classes.
    columns = () if options.problem_type == "regression" else (data.label,)
    rows, declared = read_labelled_rows(train, read, data, columns)
    held, held_declared = read_labelled_rows(evaluation, read, data, columns)
    every = [label for _, _, label in (*rows, *held)]
    are_lists = bool(every) and all(isinstance(label, list) for label in every)
    kind: ProblemType = "multi_label_classification" if are_lists else "single_label_classification"
    problem_type = options.problem_type or kind
    if problem_type == "regression":
        labels = number_names([(at, label) for at, _, label in rows or held], known)
        index = index_of(labels)
    else:
        is_fixed, given = bool(options.labels) or not rows, [label for _, _, label in rows]
        labels, index = head_labels(known, declared or held_declared, given, is_fixed=is_fixed)
    found, others = (
        list(zip([tokens for _, tokens, _ in each], _targets(each, index, problem_type), strict=True))
        for each in (rows, held)
    )
    own, held_out = (
        LabelledRows(each, tokenizer.pad_id, problem_type)
        for each in hold_out(found, others or None, data.eval_fraction, options.seed)
    )
    return RowSplits(train=own, eval=held_out, labels=labels, problem_type=problem_type)


def _targets(
    rows: Sequence[tuple[object, list[int], Label]], index: dict[str, int], problem_type: ProblemType
) -> list[Any]:
    if problem_type == "regression":
        return [numbers_of(label, list(index), at) for at, _, label in rows]
    if problem_type == "multi_label_classification":
        return [multi_hot(label, index, at) for at, _, label in rows]
    for at, _, label in rows:
        if isinstance(label, list):
            fix = "add problem_type=multi_label_classification where rows have several"
            raise DataError(f"{at} is not a labelled text", got=f"labels {label}", expected="one label", fix=fix)
    return [label_index(label, index, at) for at, _, label in rows]


def _columns(row: object, options: TextClassificationOptions, location: object) -> tuple[str, Label]:
    data = options.data
    text = document_of(row, data.text, "strict", location, "data.text")
    label = column_value(row, data.label, location, "data.label")
    if options.problem_type == "regression" and text.strip():
        numbers_of(label, None, location)
        return text, label
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    is_list = isinstance(label, list) and all(isinstance(each, (str, int, float)) for each in label)
    if not text.strip() or not (is_list or isinstance(label, (str, int))) or label in ("", IGNORED):
        got = "an empty text" if not text.strip() else f"{data.label}={label!r}"
        fix = "add problem_type=regression to learn numbers" if isinstance(label, float) else None
        expected = "a text, and a label or a list of them"
        raise DataError(f"{location} is not a labelled text", got=got, expected=expected, fix=fix)
    return text, label


class TextClassificationTask(ClassifierTask):
    """Cross entropy of the labels. A micro-batch is that of `LabelledRows.batch`, with the numbers of its samples and
    of the step."""

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The rows of this rank: the denominator of the mean loss."""
        rows = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        tokens = torch.stack([((each["ends"] + 1) * each["weights"]).sum() for each in step]).sum()
        return {"loss": rows, "samples": rows, "input_tokens": tokens}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, C], labels [B] and weights [B] on the device."""
        network = cast(SequenceClassifier, model)
        device = network.score.weight.device
        tokens, ends, labels, weights = (
            copy_to(micro_batch[name], device) for name in ("tokens", "ends", "labels", "weights")
        )
        return network.logits_at(tokens, ends, micro_batch["sizes"], dropout_key), labels, weights


class TextClassificationPipeline(LabellingPipeline[SequenceClassifier]):
    """Labels texts, in the shapes of Hugging Face's pipeline."""

    @torch.no_grad()
    def __call__(self, texts: str | Sequence[str], top_k: int | None = 1) -> list[Any]:
        """`{"label", "score"}` of each text, in order; of a single text, a list of one. With another `top_k` a list of
        that many for each, the most probable first; None: of all labels. Raises DataError for a text that is longer
        than the model's context, or without tokens."""
        rows = [texts] if isinstance(texts, str) else list(texts)
        tokens = [
            self._fitting(self._tokenizer.encode_prompt(text), f"text {number}") for number, text in enumerate(rows)
        ]
        found = Rows([None] * len(rows))
        order = sorted(range(len(rows)), key=lambda row: -len(tokens[row]))
        for start in range(0, len(order), PIPELINE_ROWS):
            part = order[start : start + PIPELINE_ROWS]
            logits = self._logits([tokens[row] for row in part])
            probabilities = label_probabilities(logits, self._model.problem_type).cpu()
            for row, scores in zip(part, probabilities, strict=True):
                chosen = scores.topk(min(top_k or len(scores), len(scores)))
                labels = [self._model.labels[index] for index in chosen.indices.tolist()]
                ranked = [
                    {"label": label, "score": score}
                    for label, score in zip(labels, chosen.values.tolist(), strict=True)
                ]
                found[row] = ranked[0] if top_k == 1 else ranked
        return found

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """`predicted_label` and `score` of each text; of a regression the `score`, or the `scores` of several outputs
        by name."""
        is_regression = self._model.problem_type == "regression"
        for found in self(list(map(str, values)), top_k=None if is_regression else 1):
            if not is_regression:
                yield {"predicted_label": found["label"], "score": found["score"]}
            elif len(found) == 1:
                yield {"score": found[0]["score"]}
            else:
                by_name = sorted(found, key=lambda each: str(each["label"]))
                yield {"scores": {each["label"]: each["score"] for each in by_name}}

    @torch.no_grad()
    def pair_scores(self, pairs: Sequence[Any]) -> list[tuple[float, int]]:
        """The score of each pair of texts, the sigmoid of its only logit as of cross-encoders in sentence-transformers,
        and the number of its tokens."""
        if not isinstance(pairs[0], tuple):
            raise DataError("a classifier scores pairs of texts", got="a conversation", expected="text_1 and text_2")
        encoded = (self._tokenizer.encode_prompt(*pair) for pair in pairs)
        rows = [self._fitting(tokens, f"pair {number}") for number, tokens in enumerate(encoded)]
        # As in BERT, the tokens of a pair begin with those of its first text alone.
        firsts = torch.tensor([len(self._tokenizer.encode_prompt(first)) for first, _ in pairs])
        parts = (slice(start, start + PIPELINE_ROWS) for start in range(0, len(rows), PIPELINE_ROWS))
        scores = torch.cat([self._logits(rows[part], firsts[part])[:, 0] for part in parts]).sigmoid()
        return list(zip(scores.tolist(), map(len, rows), strict=True))

    def _logits(self, rows: Sequence[Sequence[int]], firsts: Tensor | None = None) -> Tensor:
        device = self._model.score.weight.device
        ragged = RaggedTokens(rows)
        tokens, sizes = ragged.padded(np.arange(len(rows)), 0), torch.from_numpy(ragged.lengths)
        pad_id = self._tokenizer.pad_id if self._model.pad_id is False else self._model.pad_id
        ends = torch.tensor([last_token(row, pad_id) for row in rows])
        return self._model.logits_at(tokens.to(device), ends.to(device), sizes, firsts=firsts)


class TextClassification(LabellingKit[TextClassificationOptions]):
    """The task `text_classification`."""

    OPTIONS, PIPELINE = TextClassificationOptions, TextClassificationPipeline
    FURTHER_KINDS = ("encoder",)
    MODEL, TASK, SUFFIX = SequenceClassifier, TextClassificationTask, SEQUENCE_CLASSIFIER
    READ, COLUMN, LABELLED, OUTPUT = staticmethod(read_data), "text", "texts", "LABELS.jsonl"
    IS_SERVED = True

    def dry_rows(self, options: TextClassificationOptions) -> list[Any]:
        data = options.data
        return [{data.text: "a" * data.sequence_length, data.label: each} for each in self.dry_labels(options)]

    def open_service(
        self, model: nn.Module, processor: Tokenizer, name: str, options: TextClassificationOptions
    ) -> ScoreService:
        """What scores pairs of texts with a model of one label."""
        network = cast(SequenceClassifier, model)
        pipeline = TextClassificationPipeline(network, processor, options)
        if len(network.labels) != 1:
            got, expected = ", ".join(map(str, network.labels)), "one label"
            fix = "label a file: kitforge predict checkpoint=RUN data.eval=FILE output=FILE"
            raise ConfigError("only a model with one label scores pairs of texts", got=got, expected=expected, fix=fix)
        return ScoreService(network, pipeline.pair_scores, name, options.serve)

    def export_program(self, options: TextClassificationOptions) -> list[Path]:
        return export_programs(self, options)
