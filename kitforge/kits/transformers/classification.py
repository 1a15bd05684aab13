"""The task `text_classification`: options, labelled rows, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.data.document_shard import document_of, fingerprint_of
from kitforge.data.labels import (
    Label,
    ProblemType,
    index_of,
    label_index,
    multi_hot,
    names_of,
    number_names,
    numbers_of,
)
from kitforge.data.schedule import train_eval_split
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.transformers.labelling import (
    HeadedModel,
    HeadedTask,
    LabelledData,
    LabellingOptions,
    column,
    read_rows,
)
from kitforge.kits.transformers.rows import RaggedTokens, last_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationDataOptions:
    """Labelled rows."""

    train: Any = None  # a jsonl, json, csv, tsv or parquet file, a folder, a glob, a list of them, or rows
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    text: str = "text"  # column of the text
    label: str = "label"  # column of the label: a text or a whole number; a list of them; the numbers of a regression
    batch_size: int = 16  # rows per step
    sequence_length: int = 256  # largest number of tokens of a row
    on_too_long: Literal["refuse", "cut_right"] = "refuse"  # rows of more tokens: refuse, or drop the last ones
    on_invalid: Literal["refuse", "skip"] = "refuse"  # rows without a text or a label
    eval_fraction: float = 0.05  # fraction of the training rows held out if data.eval is not given
    shuffle: bool = True
    cache: str | None = None  # folder of trained tokenizers; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClassificationOptions(LabellingOptions):
    """All options of the task."""

    task: str = "text_classification"
    data: ClassificationDataOptions = field(default_factory=ClassificationDataOptions)


@final
class LabelledRows:
    """Tokenized rows in memory, and a label for each."""

    def __init__(
        self, tokens: Sequence[Sequence[int]], labels: Sequence[Any], indices: NDArray[np.int64], pad_id: int
    ) -> None:
        self._ends = np.array([last_token(tokens[index], pad_id) for index in indices], np.int64)
        self._tokens = RaggedTokens(tokens[index] for index in indices)
        self.lengths = self._tokens.lengths
        are_lists = any(isinstance(each, list) for each in labels)
        self.labels = np.array([labels[index] for index in indices], np.float32 if are_lists else np.int64)
        self.fingerprint = fingerprint_of(*self._tokens.identity(), self.labels.tobytes())

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: NDArray[np.int64], pad_id: int) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], the position of the token
        that classifies a row `ends` [B], labels [B], or zeros and ones or numbers [B, C], and weights [B]. Without
        rows, one of weight 0."""
        tokens = self._tokens.padded(rows, pad_id)
        if not len(rows):
            empty = torch.zeros(1, dtype=torch.int64)
            labels = torch.from_numpy(np.zeros((1, *self.labels.shape[1:]), self.labels.dtype))
            return {"tokens": tokens, "ends": empty, "labels": labels, "weights": empty.float()}
        return {
            "tokens": tokens,
            "ends": torch.from_numpy(self._ends[rows]),
            "labels": torch.from_numpy(self.labels[rows]),
            "weights": torch.ones(len(rows)),
        }


def read_data(
    train: object, evaluation: object, tokenizer: Tokenizer, options: TextClassificationOptions, known: tuple[str, ...]
) -> LabelledData[LabelledRows]:
    """Read and tokenize labelled rows. `known` are the labels of the options or of the checkpoint; without them they
    are those of the training rows, in order. Raises DataError naming the row of a text or label that is unusable."""
    data = options.data

    def read(row: object, location: object) -> tuple[list[int], Label]:
        text, label = _columns(row, options, location)
        return tokenizer.encode_prompt(text), label

    rows, held = read_rows(train, read, data), read_rows(evaluation, read, data)
    problem_type = options.problem_type or _problem_type([*rows, *held])
    if problem_type == "regression":
        labels = number_names([(at, label) for at, _, label in rows or held], known)
    else:
        labels = known or names_of([label for _, _, label in rows])
    index = index_of(labels)
    tokens, targets = [each for _, each, _ in rows], _targets(rows, index, problem_type)
    kept, held_out = np.arange(len(rows)), np.arange(0)
    if evaluation is None:
        kept, held_out = train_eval_split(len(rows), data.eval_fraction, options.seed)
    held_targets = _targets(held, index, problem_type)
    elsewhere = LabelledRows([each for _, each, _ in held], held_targets, np.arange(len(held)), tokenizer.pad_id)
    return LabelledData(
        train=LabelledRows(tokens, targets, kept, tokenizer.pad_id),
        eval=LabelledRows(tokens, targets, held_out, tokenizer.pad_id) if evaluation is None else elsewhere,
        labels=labels,
        pad_id=tokenizer.pad_id,
        problem_type=problem_type,
    )


def _problem_type(rows: Sequence[tuple[object, list[int], Label]]) -> ProblemType:
    are_lists = bool(rows) and all(isinstance(label, list) for _, _, label in rows)
    return "multi_label_classification" if are_lists else "single_label_classification"


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
            raise DataError(f"{at} is no labelled text", got=f"labels {label}", expected="one label", fix=fix)
    return [label_index(label, index, at) for at, _, label in rows]


def _columns(row: object, options: TextClassificationOptions, location: object) -> tuple[str, Label]:
    data = options.data
    text = document_of(row, data.text, "strict", location)
    label = column(row, data.label, location)
    if options.problem_type == "regression" and text.strip():
        numbers_of(label, None, location)
        return text, label
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    is_list = isinstance(label, list) and all(isinstance(each, (str, int, float)) for each in label)
    if not text.strip() or not (is_list or isinstance(label, (str, int))) or label == "":
        got = "an empty text" if not text.strip() else f"{data.label}={label!r}"
        fix = "add problem_type=regression to learn numbers" if isinstance(label, float) else None
        expected = "a text, and a label or a list of them"
        raise DataError(f"{location} is no labelled text", got=got, expected=expected, fix=fix)
    return text, label


@final
class SequenceClassifier(HeadedModel):
    """A decoder with a linear head [C, dim] on the output of a row's last token, as `*ForSequenceClassification` of
    transformers."""

    def logits_at(self, tokens: Tensor, ends: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """Logits [B, C] of rows [B, T] whose last tokens are at `ends` [B]."""
        hidden = cast(CausalLM, self.backbone).hidden(tokens, Context(dropout=dropout))
        last = hidden[torch.arange(len(ends), device=hidden.device), ends]
        scores: Tensor = self.score(last)
        return scores.float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, C] of rows [B, T] without padding."""
        return self.logits_at(tokens, torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device))


@final
class TextClassificationTask(HeadedTask):
    """Cross entropy of the labels. A micro-batch is that of `LabelledRows.batch`, with the numbers of its samples and
    of the step."""

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The rows of this rank: the denominator of the mean loss."""
        rows = torch.stack([micro_batch["weights"].sum() for micro_batch in step]).sum()
        tokens = torch.stack([((each["ends"] + 1) * each["weights"]).sum() for each in step]).sum()
        return {"loss": rows, "samples": rows, "input_tokens": tokens}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, noise: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B, C], labels [B] and weights [B] on the device."""
        network = cast(SequenceClassifier, model)
        device = network.score.weight.device
        tokens, ends, labels, weights = (
            copy_to(micro_batch[name], device) for name in ("tokens", "ends", "labels", "weights")
        )
        return network.logits_at(tokens, ends, noise), labels, weights
