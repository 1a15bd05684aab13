"""The task `token_classification`: options, rows of words and tags, the network, its loss and its metrics.

B rows, T tokens, C labels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.nn.context import DropoutKey
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.labels import head_labels
from kitforge.data.text.tagged_words import TAG_COLUMNS, TokenTag, tagged_tokens, token_codes, words_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check_choice
from kitforge.foundation.device import copy_to
from kitforge.foundation.types import MicroBatch, Sums
from kitforge.kits.transformers.entities import CHUNK_TAG, Aggregation, entities, entity_counts, entity_metrics
from kitforge.kits.transformers.labelling import (
    LabellingKit,
    LabellingOptions,
    LabellingPipeline,
    TextRowOptions,
    TokenClassifier,
    read_labelled_rows,
)
from kitforge.kits.transformers.rows import ClassifierTask, RaggedTokens, RowSplits, SplitRows, hold_out
from kitforge.models.classifier_heads import TOKEN_CLASSIFIER
from kitforge.report.notebook import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDataOptions(TextRowOptions):
    """Rows of words and a tag for each."""

    words: str = "tokens"  # column of the list of words
    tags: str | None = None  # column of the list of their labels, texts or whole numbers; null: ner_tags, or tags
    label_all_tokens: bool = False  # train on every token of a word; false: on its first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenClassificationOptions(LabellingOptions):
    """All options of the task."""

    task: str = "token_classification"
    data: TokenDataOptions = field(default_factory=TokenDataOptions)


class TaggedRows(SplitRows):
    """Tokenized rows in memory, and the label of each token."""

    def __init__(self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad_id: int) -> None:
        self._pad_id = pad_id
        self._tokens, self._codes = (RaggedTokens(row[side] for row in rows) for side in (0, 1))
        self.lengths = self._tokens.lengths
        self.fingerprint = fingerprint_of(*self._tokens.identity(), *self._codes.identity())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Rows padded on the right, which causal attention never reads: tokens [B, T], labels [B, T] (-1: none),
        `firsts` [B, T], true at the first token of a word, and the number of tokens `sizes` [B]. Without rows, one
        without labels, of size 0."""
        codes = self._codes.padded(rows, 0)
        sizes = torch.from_numpy(self.lengths[rows]) if len(rows) else torch.zeros(1, dtype=torch.int64)
        labels = torch.div(codes - 1, 2, rounding_mode="floor")
        tokens = self._tokens.padded(rows, self._pad_id)
        return {"tokens": tokens, "labels": labels, "firsts": codes % 2 == 1, "sizes": sizes}


def read_tagged(
    train: object, evaluation: object, tokenizer: Tokenizer, options: TokenClassificationOptions, known: tuple[str, ...]
) -> RowSplits[TaggedRows]:
    """Read and tokenize rows of words and tags. `known` are the labels of the options or of the checkpoint; without
    them they are those of the training rows, in order. Raises DataError naming the row that is unusable."""
    data = options.data

    def read(row: object, location: object) -> tuple[list[int], list[TokenTag]]:
        return tagged_tokens(row, (data.words, data.tags), tokenizer, location)

    columns = TAG_COLUMNS if data.tags is None else (data.tags,)
    rows, declared = read_labelled_rows(train, read, data, columns)
    held, held_declared = read_labelled_rows(evaluation, read, data, columns)
    own_tags = [tag for _, _, tags in rows for tag, _ in tags if tag is not None]
    is_fixed = bool(options.labels) or not rows
    labels, index = head_labels(known, declared or held_declared, own_tags, is_fixed=is_fixed)
    coded = partial(token_codes, index=index, labels_all=data.label_all_tokens)
    found, others = (
        [(tokens, coded(tags, location=location)[: len(tokens)]) for location, tokens, tags in each]
        for each in (rows, held)
    )
    parts = hold_out(found, others or None, data.eval_fraction, options.seed)
    own, held_out = (TaggedRows(each, tokenizer.pad_id) for each in parts)
    return RowSplits(train=own, eval=held_out, labels=labels)


class TokenClassificationTask(ClassifierTask):
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
        return network.logits_at(tokens, micro_batch["sizes"], dropout_key), flat.clamp(min=0), (flat >= 0).float()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss and eval/accuracy of the labelled tokens; where the labels are chunk tags eval/precision,
        eval/recall and eval/f1 of the entities, else the macro F1 of the labels. The entities are those of the words,
        by seqeval's default mode."""
        found = super().evaluate(model)
        names = list(map(str, self._rows.labels))
        if not found or not all(map(CHUNK_TAG.fullmatch, names)):
            return found
        counts = torch.zeros(3, dtype=torch.float64)
        for micro_batch in self.eval_micro_batches(model):
            logits = torch.unflatten(self.logits(model, micro_batch, None)[0], 0, micro_batch["labels"].shape)
            best = logits.argmax(-1).cpu()
            for firsts, *both in zip(micro_batch["firsts"], micro_batch["labels"], best, strict=True):
                wanted, predicted = ([names[tag] for tag in each[firsts].tolist()] for each in both)
                counts += torch.tensor(entity_counts(wanted, predicted))
        metrics = entity_metrics(*self._world.sum({"counts": counts})["counts"].tolist())
        return found | {f"eval/{name}": value for name, value in metrics.items()}


class TokenClassificationPipeline(LabellingPipeline[TokenClassifier]):
    """Finds entities, in the shapes of Hugging Face's pipeline."""

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
        encoded = [self._tokenizer.encode_offsets(text) for text in rows]
        scores = [self._probabilities(tokens, f"text {number}") for number, (tokens, _) in enumerate(encoded)]
        found = Rows(
            Rows(entities(text, each, spans, self._model.labels, aggregation_strategy, ignore_labels))
            for text, each, (_, spans) in zip(rows, scores, encoded, strict=True)
        )
        return found[0] if isinstance(texts, str) else found

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """`predicted_tags` of each row of words: their labels, by their first tokens; None of words that were cut
        off."""
        for words in values:
            tokens, owners = words_of(self._tokenizer, words)
            best = self._probabilities(tokens, repr(" ".join(words))[:60]).argmax(-1).tolist()
            found = {word: self._model.labels[label] for word, label in reversed([*zip(owners, best, strict=False)])}
            yield {"predicted_tags": [found.get(number) for number in range(len(words))]}

    @torch.no_grad()
    def _probabilities(self, tokens: Sequence[int], name: str) -> Tensor:
        """[T, C] on the CPU, of no more tokens than the context has."""
        row = torch.tensor([self._fitting(tokens, name)], device=self._model.score.weight.device)
        return self._model.logits_at(row).softmax(-1).cpu()


class TokenClassification(LabellingKit[TokenClassificationOptions]):
    """The task `token_classification`."""

    OPTIONS, PIPELINE = TokenClassificationOptions, TokenClassificationPipeline
    FURTHER_KINDS = ("encoder",)
    MODEL, TASK, SUFFIX = TokenClassifier, TokenClassificationTask, TOKEN_CLASSIFIER
    READ, COLUMN, LABELLED, OUTPUT = staticmethod(read_tagged), "words", "tokens", "TAGS.jsonl"

    def dry_rows(self, options: TokenClassificationOptions) -> list[Any]:
        """A row of words of a letter, with a space before each but the first."""
        data, labels = options.data, self.dry_labels(options)
        first = "a" if data.sequence_length % 2 else "aa"
        words = [first, *["a"] * ((data.sequence_length - len(first)) // 2)]
        tags = (labels * len(words))[: len(words)]
        return [{data.words: words, data.tags or TAG_COLUMNS[0]: tags}]
