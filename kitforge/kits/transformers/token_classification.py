"""The task `token_classification`: options, rows of words and tags, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.core.nn.context import Context, DropoutKey
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.labels import label_index, label_names
from kitforge.data.optional_imports import import_optional
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
from kitforge.kits.transformers.rows import RaggedTokens

# O, or a chunk tag of one of the schemes that seqeval reads: BIO, IOE, IOBES, BILOU.
_CHUNK_TAG = re.compile(r"O|[BIESLU]-.+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDataOptions:
    """Rows of words and a tag for each."""

    train: Any = None  # a jsonl, json or parquet file, a folder, a glob, a list of them, or rows
    eval: Any = None  # None: a fraction of the training rows (eval_fraction)
    words: str = "tokens"  # column of the list of words
    tags: str = "ner_tags"  # column of the list of their labels: texts or whole numbers
    label_all_tokens: bool = False  # train on every token of a word; false: on its first
    batch_size: int = 16  # rows per step
    sequence_length: int = 256  # largest number of tokens of a row
    on_too_long: Literal["refuse", "cut_right"] = "refuse"  # rows of more tokens: refuse, or drop the last ones
    on_invalid: Literal["refuse", "skip"] = "refuse"  # rows without words, or with another number of tags
    eval_fraction: float = 0.05  # fraction of the training rows held out if data.eval is not given
    shuffle: bool = True
    cache: str | None = None  # folder of trained tokenizers; None: $KITFORGE_CACHE or ~/.cache/kitforge

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length"):
            check(getattr(self, name) > 0, f"data.{name}", getattr(self, name), "a whole number of at least 1")
        check(0 <= self.eval_fraction < 1, "data.eval_fraction", self.eval_fraction, "at least 0, below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassificationOptions(LabellingOptions):
    """All options of the task."""

    task: str = "token_classification"
    data: TokenDataOptions = field(default_factory=TokenDataOptions)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedText:
    """Words with one space between them: the word of each token (-1: of none), and the tags of the words."""

    words: list[int]
    tags: list[str | int]


@final
class TaggedRows:
    """Tokenized rows in memory, and the label of each token."""

    def __init__(self, tokens: Sequence[Sequence[int]], codes: Sequence[Sequence[int]]) -> None:
        self._tokens, self._codes = RaggedTokens(tokens), RaggedTokens(codes)
        self.lengths = self._tokens.lengths
        self.fingerprint = fingerprint_of(*self._tokens.identity(), *self._codes.identity())

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: NDArray[np.int64], pad_id: int) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], labels [B, T] (-1: none),
        `firsts` [B, T], true at the first token of a word, and the number of tokens `sizes` [B]. Without rows, one
        without labels, of size 0."""
        codes = self._codes.padded(rows, 0)
        sizes = torch.from_numpy(self.lengths[rows]) if len(rows) else torch.zeros(1, dtype=torch.int64)
        labels = torch.div(codes - 1, 2, rounding_mode="floor")
        tokens = self._tokens.padded(rows, pad_id)
        return {"tokens": tokens, "labels": labels, "firsts": codes % 2 == 1, "sizes": sizes}


def words_of(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[list[int], list[int]]:
    """The tokens of words with one space between them, and the word of each (-1: of none)."""
    tokens, spans = tokenizer.encode_offsets(" ".join(words))
    letters = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]
    starts = np.cumsum([0] + [len(word) + 1 for word in words])
    owners = []
    for start, stop in spans:
        # A space belongs to no word; a token of two words to the first.
        inside = (letters[at] for at in range(start, stop) if at < starts[letters[at] + 1] - 1)
        owners.append(next(inside, -1))
    return tokens, owners


def read_tagged(
    train: object, evaluation: object, tokenizer: Tokenizer, options: TokenClassificationOptions, known: tuple[str, ...]
) -> LabelledData[TaggedRows]:
    """Read and tokenize rows of words and tags. `known` are the labels of the options or of the checkpoint; without
    them they are those of the training rows, in order. Raises DataError naming the row that is unusable."""
    data = options.data

    def read(row: object, location: object) -> tuple[list[int], TaggedText]:
        words, tags = _columns(row, data, location)
        tokens, owners = words_of(tokenizer, words)
        missing = set(range(len(words))) - set(owners)
        if missing:
            got = repr(words[min(missing)])
            raise DataError(f"{location} has a word without tokens", got=got, expected="visible letters in every word")
        return tokens, TaggedText(words=owners, tags=tags)

    rows, held = read_rows(train, read, data), read_rows(evaluation, read, data)
    labels = known or label_names([tag for _, _, text in rows for tag in text.tags])
    index = {name: number for number, name in enumerate(labels)}
    codes, held_codes = (
        [_codes(text, index, at, data.label_all_tokens)[: len(tokens)] for at, tokens, text in each]
        for each in (rows, held)
    )
    kept, held_out = np.arange(len(rows)), np.arange(0)
    if evaluation is None:
        kept, held_out = train_eval_split(len(rows), data.eval_fraction, options.seed)
    tokens = [each for _, each, _ in rows]
    parts = [TaggedRows([tokens[row] for row in each], [codes[row] for row in each]) for each in (kept, held_out)]
    elsewhere = TaggedRows([each for _, each, _ in held], held_codes)
    return LabelledData(
        train=parts[0],
        eval=parts[1] if evaluation is None else elsewhere,
        labels=labels,
        pad_id=tokenizer.pad_id,
    )


def _columns(row: object, data: TokenDataOptions, location: object) -> tuple[list[str], list[str | int]]:
    words, tags = (column(row, name, location) for name in (data.words, data.tags))
    if not (isinstance(words, list) and words and all(isinstance(each, str) and each.strip() for each in words)):
        expected = f"a list of texts in the column {data.words!r}"
        raise DataError(f"{location} has no words", got=repr(words)[:80], expected=expected)
    is_list = isinstance(tags, list) and all(isinstance(each, (str, int)) and each != "" for each in tags)
    if not is_list or len(tags) != len(words):
        got = f"{len(tags)} tags" if is_list else repr(tags)[:80]
        raise DataError(f"{location} has other tags than words", got=got, expected=f"{len(words)}, texts or numbers")
    return words, tags


def _codes(text: TaggedText, index: dict[str, int], location: object, labels_all: bool) -> list[int]:
    """Of each token 0 if it has no label, else 1 + 2 label, and one more if it is not the first of its word."""
    numbers = [label_index(tag, index, location) for tag in text.tags]
    names, seen, found = list(index), set[int](), list[int]()
    for word in text.words:
        is_first, number = word not in seen, numbers[word] if word >= 0 else -1
        seen.add(word)
        if not is_first and number >= 0:
            # The entity goes on within a word: I- follows B-.
            number = index.get(re.sub("^B-", "I-", names[number]), number) if labels_all else -1
        found.append(0 if number < 0 else 1 + 2 * number + (not is_first))
    return found


@final
class TokenClassifier(HeadedModel):
    """A decoder with a linear head [C, dim] and bias on the output of every token, as `*ForTokenClassification` of
    transformers."""

    has_bias = True

    def logits_at(self, tokens: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """Logits [B T, C] of rows [B, T], one row after another: no view, which FSDP cannot hook."""
        hidden = cast(CausalLM, self.backbone).hidden(tokens, Context(dropout=dropout))
        scores: Tensor = self.score(hidden.flatten(0, 1))
        return scores.float()

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, C] of rows [B, T]."""
        return self.logits_at(tokens).view(*tokens.shape, -1)


@final
class TokenClassificationTask(HeadedTask):
    """Cross entropy of the tokens that have a label. A micro-batch is that of `TaggedRows.batch`, with the numbers of
    its samples and of the step."""

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The labelled tokens of this rank: the denominator of the mean loss."""
        labelled = torch.stack([(each["labels"] >= 0).sum() for each in step]).sum()
        rows = torch.stack([(each["sizes"] > 0).sum() for each in step]).sum()
        tokens = torch.stack([each["sizes"].sum() for each in step]).sum()
        return {"loss": labelled.float(), "samples": rows.float(), "input_tokens": tokens.float()}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, noise: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B T, C], labels [B T] and weights [B T] on the device; of weight 0 without a label."""
        network = cast(TokenClassifier, model)
        device = network.score.weight.device
        tokens, labels = (copy_to(micro_batch[name], device) for name in ("tokens", "labels"))
        flat = labels.flatten()
        return network.logits_at(tokens, noise), flat.clamp(min=0), (flat >= 0).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss and eval/accuracy of the labelled tokens; where the labels are chunk tags eval/precision,
        eval/recall and eval/f1 of the entities, else the macro F1 of the labels. The entities are those of the words,
        by seqeval's default mode."""
        found = super().evaluate(model)
        if not found or not all(_CHUNK_TAG.fullmatch(label) for label in self._data.labels):
            return found
        counts = torch.zeros(3, dtype=torch.float64)
        for micro_batch in self.eval_micro_batches(model):
            logits = self.logits(model, micro_batch, None)[0].view(*micro_batch["labels"].shape, -1)
            best = logits.argmax(-1).cpu()
            for firsts, *both in zip(micro_batch["firsts"], micro_batch["labels"], best, strict=True):
                wanted, predicted = ([self._data.labels[tag] for tag in each[firsts].tolist()] for each in both)
                counts += torch.tensor(entity_counts(wanted, predicted))
        right, predictions, entities = self._world.sum({"counts": counts})["counts"].tolist()
        return found | {
            "eval/precision": right / max(predictions, 1),
            "eval/recall": right / max(entities, 1),
            "eval/f1": 2 * right / max(predictions + entities, 1),
        }


def entity_counts(wanted: Sequence[str], predicted: Sequence[str]) -> tuple[float, float, float]:
    """Entities of one row that were found, that were predicted, and that there are; an entity is right if its type and
    both of its ends are."""
    seqeval = import_optional("seqeval.metrics.sequence_labeling", needed_for="entity F1", extra="transformers")
    theirs, ours = (set(seqeval.get_entities(list(each))) for each in (wanted, predicted))
    return float(len(theirs & ours)), float(len(ours)), float(len(theirs))
