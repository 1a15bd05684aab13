"""The task `token_classification`: options, rows of words and tags, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.context import DropoutKey
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.labels import label_index, label_names
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check_choice
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.batch_predict import Predict, predict_rows, row_batches
from kitforge.kits.kit import LoadModel
from kitforge.kits.language_model import stored_tokenizer
from kitforge.kits.transformers.entities import CHUNK_TAG, Aggregation, entities, entity_counts
from kitforge.kits.transformers.labelling import (
    HeadedTask,
    LabelledData,
    LabelledRowOptions,
    LabellingKit,
    LabellingOptions,
    TokenClassifier,
    check_text_length,
    column,
    eval_split,
    read_labelled_rows,
)
from kitforge.kits.transformers.rows import RaggedTokens
from kitforge.models.loading import TOKEN_CLASSIFIER


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDataOptions(LabelledRowOptions):
    """Rows of words and a tag for each."""

    words: str = "tokens"  # column of the list of words
    tags: str = "ner_tags"  # column of the list of their labels: texts or whole numbers
    label_all_tokens: bool = False  # train on every token of a word; false: on its first


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

    def __init__(self, tokens: Sequence[Sequence[int]], codes: Sequence[Sequence[int]], pad_id: int) -> None:
        self._pad_id = pad_id
        self._tokens, self._codes = RaggedTokens(tokens), RaggedTokens(codes)
        self.lengths = self._tokens.lengths
        self.fingerprint = fingerprint_of(*self._tokens.identity(), *self._codes.identity())

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], labels [B, T] (-1: none),
        `firsts` [B, T], true at the first token of a word, and the number of tokens `sizes` [B]. Without rows, one
        without labels, of size 0."""
        codes = self._codes.padded(rows, 0)
        sizes = torch.from_numpy(self.lengths[rows]) if len(rows) else torch.zeros(1, dtype=torch.int64)
        labels = torch.div(codes - 1, 2, rounding_mode="floor")
        tokens = self._tokens.padded(rows, self._pad_id)
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

    rows, held = read_labelled_rows(train, read, data), read_labelled_rows(evaluation, read, data)
    labels = known or label_names([tag for _, _, text in rows for tag in text.tags])
    index = {name: number for number, name in enumerate(labels)}
    codes, held_codes = (
        [_codes(text, index, at, data.label_all_tokens)[: len(tokens)] for at, tokens, text in each]
        for each in (rows, held)
    )
    kept, held_out = eval_split(len(rows), data, options.seed, has_own=evaluation is not None)
    tokens, pad_id = [each for _, each, _ in rows], tokenizer.pad_id
    parts = [
        TaggedRows([tokens[row] for row in each], [codes[row] for row in each], pad_id) for each in (kept, held_out)
    ]
    elsewhere = TaggedRows([each for _, each, _ in held], held_codes, pad_id)
    return LabelledData(train=parts[0], eval=parts[1] if evaluation is None else elsewhere, labels=labels)


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
        self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [B T, C], labels [B T] and weights [B T] on the device; of weight 0 without a label."""
        network = cast(TokenClassifier, model)
        device = network.score.weight.device
        tokens, labels = (copy_to(micro_batch[name], device) for name in ("tokens", "labels"))
        flat = labels.flatten()
        return network.logits_at(tokens, dropout_key), flat.clamp(min=0), (flat >= 0).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss and eval/accuracy of the labelled tokens; where the labels are chunk tags eval/precision,
        eval/recall and eval/f1 of the entities, else the macro F1 of the labels. The entities are those of the words,
        by seqeval's default mode."""
        found = super().evaluate(model)
        if not found or not all(CHUNK_TAG.fullmatch(label) for label in self._data.labels):
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


@final
class TokenClassification(LabellingKit[TokenClassificationOptions]):
    """The task `token_classification`."""

    OPTIONS = TokenClassificationOptions
    MODEL, TASK, SUFFIX = TokenClassifier, TokenClassificationTask, TOKEN_CLASSIFIER
    READ, OUTPUT = staticmethod(read_tagged), "TAGS.jsonl"

    def open_pipeline(
        self, model: nn.Module, processor: Tokenizer, options: TokenClassificationOptions
    ) -> TokenClassificationPipeline:
        """The token classification pipeline."""
        return TokenClassificationPipeline(model, processor, options)

    def predict_file(self, options: TokenClassificationOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with `predicted_tags`, one for each word, to the jsonl file `output`."""

        def opened(model: nn.Module, folder: Path) -> Predict[dict[str, Any]]:
            tag = self.open_pipeline(model, stored_tokenizer(folder), options)
            return lambda rows: (row | {"predicted_tags": tag.tags_of(row[options.data.words])} for row in rows)

        return predict_rows(options, row_batches(options.data.eval, options.data.words, 32), load_model, opened)


@final
class TokenClassificationPipeline:
    """Finds entities, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: TokenClassificationOptions) -> None:
        if not isinstance(model, TokenClassifier):
            expected = "the model of a run of token_classification"
            raise ModelError("this model does not label tokens", got=type(model).__name__, expected=expected)
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._cuts = options.data.on_too_long == "cut_right"
        self._longest = model.language_model.geometry.max_length

    def __call__(
        self,
        texts: str | Sequence[str],
        aggregation_strategy: Aggregation = "none",
        ignore_labels: Sequence[str] = ("O",),
    ) -> list[Any]:
        """The tokens of a text that have a label, as `{"entity", "score", "index", "word", "start", "end"}`, or with an
        aggregation its entities, as `{"entity_group", "score", "word", "start", "end"}`; of several texts a list of
        these. `word` is the text between `start` and `end`, in characters. "simple" joins tokens of one label; "first",
        "average" and "max" first give each word, up to the next space, one label. Raises DataError for a text that is
        longer than the model's context, or without tokens."""
        check_choice("aggregation_strategy", aggregation_strategy, Aggregation)
        rows = [texts] if isinstance(texts, str) else list(texts)
        found = [self._entities(text, number, aggregation_strategy) for number, text in enumerate(rows)]
        kept = [
            [each for each in entities if each.get("entity", each.get("entity_group")) not in ignore_labels]
            for entities in found
        ]
        return kept[0] if isinstance(texts, str) else kept

    def tags_of(self, words: Sequence[str]) -> list[str | None]:
        """The label of each word, by its first token; None of words that were cut off."""
        tokens, owners = words_of(self._tokenizer, words)
        best = self._probabilities(tokens, repr(" ".join(words))[:60]).argmax(-1).tolist()
        found: dict[int, str] = {}
        for word, label in zip(owners, best, strict=False):
            found.setdefault(word, self._model.labels[label])
        return [found.get(number) for number in range(len(words))]

    def _entities(self, text: str, number: int, strategy: Aggregation) -> list[dict[str, Any]]:
        tokens, spans = self._tokenizer.encode_offsets(text)
        return entities(text, self._probabilities(tokens, f"text {number}"), spans, self._model.labels, strategy)

    @torch.no_grad()
    def _probabilities(self, tokens: Sequence[int], name: str) -> Tensor:
        """[T, C] on the CPU, of no more tokens than the context has."""
        check_text_length(tokens, self._longest, self._cuts, name)
        row = torch.tensor([tokens[: self._longest]], device=self._model.score.weight.device)
        return self._model.logits_at(row).softmax(-1).cpu()
