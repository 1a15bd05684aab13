"""The task `text_classification`: options, labelled rows, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.core.optim.groups import ParameterGroup, decay_groups
from kitforge.core.parallel.sharding import Sharding, ShardingRule
from kitforge.core.parallel.world import World
from kitforge.data.document_shard import document_of, fingerprint_of, missing_column
from kitforge.data.images import label_names
from kitforge.data.schedule import train_eval_split
from kitforge.data.source import open_rows
from kitforge.data.tokenizer import Tokenizer, TokenizerConfig
from kitforge.foundation import seed as seeds
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError, nearest
from kitforge.foundation.log import logger
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.language_model import LoraOptions
from kitforge.kits.transformers.rows import ClassifierTask, RaggedTokens
from kitforge.kits.transformers.task import EMBEDDINGS
from kitforge.models.sharding import sharding_of_network
from kitforge.trainer.options import RunOptions

BACKBONE, HEAD = "backbone.", "score.weight"
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationDataOptions:
    """Labelled rows."""

    train: Any = None  # a jsonl, json, csv or parquet file, a folder, a glob, a list of them, or rows
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    text: str = "text"  # column of the text
    label: str = "label"  # column of the label: a text or a whole number
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
class TextClassificationOptions(RunOptions):
    """All options of the task."""

    task: str = "text_classification"
    model: dict[str, Any] = field(default_factory=dict)  # `family` and the options of that family's config
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: ClassificationDataOptions = field(default_factory=ClassificationDataOptions)
    labels: tuple[str, ...] = ()  # in the order of the logits; null: those of the checkpoint, else of the training rows
    lora: LoraOptions = field(default_factory=LoraOptions)
    freeze: tuple[str, ...] = ()  # parameters that are not trained, as patterns: ["backbone.embedding.*"]
    # Run, folder, .gguf file, named checkpoint (`kitforge models`) or Hub id (NAME/MODEL@REVISION) with the weights.
    checkpoint: str | None = None
    format: Literal["huggingface"] = "huggingface"  # of `export`
    output: str | None = None  # jsonl file of `predict`

    def __post_init__(self) -> None:
        self.lora.check_parallel(self.parallel)
        is_one = not (self.freeze and self.lora.is_on)
        check(is_one, "freeze", list(self.freeze), "nothing with lora.rank, which freezes all weights")
        check(len(set(self.labels)) == len(self.labels) != 1, "labels", list(self.labels), "two or more, all distinct")
        degrees = self.parallel
        is_whole = degrees.tensor == 1 or not degrees.sequence_parallel
        fix = "add parallel.sequence_parallel=false"
        check(is_whole, "parallel.sequence_parallel", True, "false for rows of any length", fix)


@final
class LabelledRows:
    """Tokenized rows in memory, and a label for each."""

    def __init__(self, tokens: Sequence[Sequence[int]], labels: Sequence[int], indices: NDArray[np.int64]) -> None:
        self._tokens = RaggedTokens(tokens[index] for index in indices)
        self.lengths = self._tokens.lengths
        self.labels = np.array([labels[index] for index in indices], np.int64)
        self.fingerprint = fingerprint_of(*self._tokens.identity(), self.labels.tobytes())

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, rows: NDArray[np.int64], pad_id: int) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], the position of the last token
        `ends` [B], labels [B] and weights [B]. Without rows, one of weight 0."""
        tokens = self._tokens.padded(rows, pad_id)
        if not len(rows):
            empty = torch.zeros(1, dtype=torch.int64)
            return {"tokens": tokens, "ends": empty, "labels": empty, "weights": empty.float()}
        return {
            "tokens": tokens,
            "ends": torch.from_numpy(self.lengths[rows] - 1),
            "labels": torch.from_numpy(self.labels[rows]),
            "weights": torch.ones(len(rows)),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledData:
    """Training and evaluation rows, and the names of their labels."""

    train: LabelledRows
    eval: LabelledRows
    labels: tuple[str, ...]
    pad_id: int

    @property
    def fingerprint(self) -> str:
        """Of all rows."""
        return fingerprint_of(self.train.fingerprint, self.eval.fingerprint, self.labels)


def read_data(
    train: object, evaluation: object, tokenizer: Tokenizer, options: TextClassificationOptions, known: tuple[str, ...]
) -> LabelledData:
    """Read and tokenize labelled rows. `known` are the labels of the options or of the checkpoint; without them they
    are those of the training rows, in order. Raises DataError naming the row of a text or label that is unusable."""
    data = options.data
    rows, held = _read(train, tokenizer, data), _read(evaluation, tokenizer, data)
    labels = known or label_names([label for _, _, label in rows])
    tokens, targets = [each for _, each, _ in rows], _indices(rows, labels)
    kept, held_out = np.arange(len(rows)), np.arange(0)
    if evaluation is None:
        kept, held_out = train_eval_split(len(rows), data.eval_fraction, options.seed)
    elsewhere = LabelledRows([each for _, each, _ in held], _indices(held, labels), np.arange(len(held)))
    return LabelledData(
        train=LabelledRows(tokens, targets, kept),
        eval=LabelledRows(tokens, targets, held_out) if evaluation is None else elsewhere,
        labels=labels,
        pad_id=tokenizer.pad_id,
    )


def _read(
    spec: object, tokenizer: Tokenizer, data: ClassificationDataOptions
) -> list[tuple[object, list[int], str | int]]:
    """Location, tokens and label of every row."""
    found: list[tuple[object, list[int], str | int]] = []
    num_skipped = num_cut = 0
    located = (pair for shard in (open_rows(spec) if spec is not None else ()) for pair in shard.rows())
    for location, row in located:
        try:
            text, label = _columns(row, data, location)
        except DataError:
            if data.on_invalid == "refuse":
                raise
            num_skipped += 1
            continue
        tokens = encode_text(tokenizer, text)
        is_long = len(tokens) > data.sequence_length
        if is_long and data.on_too_long == "refuse":
            got, expected = f"{len(tokens)} tokens", f"at most data.sequence_length={data.sequence_length}"
            fix = "raise data.sequence_length, or add data.on_too_long=cut_right"
            raise DataError(f"{location} is too long", got=got, expected=expected, fix=fix)
        num_cut += is_long
        found.append((location, tokens[: data.sequence_length], label))
    if spec is not None and not found:
        raise DataError("there are no labelled rows", got=f"{num_skipped} unusable ones", expected="at least one")
    if num_skipped or num_cut:
        _log.warning("%d rows: %d more were skipped, %d were cut", len(found), num_skipped, num_cut)
    return found


def _columns(row: object, data: ClassificationDataOptions, location: object) -> tuple[str, str | int]:
    text = document_of(row, data.text, "strict", location)
    values = row if isinstance(row, dict) else {}
    if data.label not in values:
        raise missing_column(data.label, map(str, values), location)
    label = values[data.label]
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if not text.strip() or not isinstance(label, (str, int)) or label == "":
        got = "an empty text" if not text.strip() else f"{data.label}={label!r}"
        raise DataError(f"{location} is no labelled text", got=got, expected="a text, and a text or a number as label")
    return text, label


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text, between those that the vocabulary begins and ends every text with."""
    return tokenizer.encode_prompt(text)


def _indices(rows: Sequence[tuple[object, list[int], str | int]], names: tuple[str, ...]) -> list[int]:
    """The index of each row's label. A number that is no name is an index, as Hugging Face has it."""
    index = {name: number for number, name in enumerate(names)}
    found = []
    for location, _, label in rows:
        number = index.get(str(label), label if isinstance(label, int) and 0 <= label < len(names) else None)
        if number is None:
            fix = nearest(str(label), names)
            raise DataError(f"{location} has an unknown label", got=label, expected=", ".join(names[:20]), fix=fix)
        found.append(int(number))
    return found


@final
class SequenceClassifier(nn.Module):
    """A decoder with a linear head [C, dim] on the output of a row's last token, as `*ForSequenceClassification` of
    transformers."""

    def __init__(self, backbone: nn.Module, labels: Sequence[str]) -> None:
        super().__init__()
        like = cast(CausalLM, backbone).head_weight
        self.backbone = backbone
        self.labels = tuple(labels)
        dim = cast(CausalLM, backbone).geometry.dim
        self.score = nn.Linear(dim, len(self.labels), bias=False, device=like.device, dtype=like.dtype)

    def logits_at(self, tokens: Tensor, ends: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """Logits [B, C] of rows [B, T] whose last tokens are at `ends` [B]."""
        hidden = cast(CausalLM, self.backbone).hidden(tokens, Context(dropout=dropout))
        last = hidden[torch.arange(len(ends), device=hidden.device), ends]
        scores: Tensor = self.score(last)
        return scores.float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, C] of rows [B, T] without padding."""
        return self.logits_at(tokens, torch.full((len(tokens),), tokens.shape[1] - 1, device=tokens.device))


def initial_head(num_labels: int, dim: int, seed: int) -> Tensor:
    """The first weights [C, dim] of a head, with standard deviation 0.02."""
    return torch.randn((num_labels, dim), generator=seeds.generator(seed, "init", HEAD)) * 0.02


def sharding_of_classifier(model: SequenceClassifier) -> Sharding:
    """How a classifier is sharded. The head is replicated, and so is its gradient."""
    backbone = sharding_of_network(model.backbone).with_prefix("backbone")
    score = Sharding(rules=(ShardingRule(module="score", gradient="whole"),) if backbone.rules else ())
    merged = backbone.merged_with(score)
    return Sharding(rules=merged.rules, divisible=merged.divisible, fsdp_roots={"": ("logits_at",)})


@final
class TextClassificationTask(ClassifierTask):
    """Cross entropy of the labels. A micro-batch is that of `LabelledRows.batch`, with the numbers of its samples and
    of the step."""

    def __init__(
        self,
        options: TextClassificationOptions,
        data: LabelledData,
        build: Callable[[World], nn.Module],
        world: World,
    ) -> None:
        rows = options.data
        super().__init__(options, data, build, world, batch_size=rows.batch_size, shuffle=rows.shuffle)
        self._options = options
        self._data = data
        self.num_labels = len(data.labels)

    def parameter_groups(self, model: nn.Module, weight_decay: float) -> list[ParameterGroup]:
        """Weight decay for matrices only: not for embeddings, norms and biases."""
        names = [name for name, _ in model.named_parameters()]
        tables = [name for name in names if name.removeprefix(BACKBONE) in EMBEDDINGS]
        return decay_groups(model.named_parameters(), weight_decay=weight_decay, no_decay=tables, heads=[HEAD])

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
