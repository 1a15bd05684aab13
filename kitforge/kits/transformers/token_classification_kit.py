"""The wiring of `token_classification`, its pipeline, and the tags of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import DataError, ModelError
from kitforge.kits.batch_predict import Predict, predict_rows, row_batches
from kitforge.kits.kit import LoadModel
from kitforge.kits.language_model import stored_tokenizer
from kitforge.kits.transformers.labelling import LabelledData
from kitforge.kits.transformers.labelling_kit import LabellingKit
from kitforge.kits.transformers.token_classification import (
    TaggedRows,
    TokenClassificationOptions,
    TokenClassificationTask,
    TokenClassifier,
    read_tagged,
    words_of,
)
from kitforge.models.loading import TOKEN_CLASSIFIER

Aggregation = Literal["none", "simple", "first", "average", "max"]


@final
class TokenClassification(LabellingKit[TokenClassificationOptions]):
    """The task `token_classification`."""

    OPTIONS = TokenClassificationOptions
    MODEL, TASK, SUFFIX = TokenClassifier, TokenClassificationTask, TOKEN_CLASSIFIER

    def read_data(
        self,
        train: object,
        evaluation: object,
        tokenizer: Tokenizer,
        options: TokenClassificationOptions,
        known: tuple[str, ...],
    ) -> LabelledData[TaggedRows]:
        """Words and tags."""
        return read_tagged(train, evaluation, tokenizer, options, known)

    def open_pipeline(
        self, model: nn.Module, processor: Tokenizer, options: TokenClassificationOptions
    ) -> TokenClassificationPipeline:
        """What finds the entities of texts."""
        return TokenClassificationPipeline(model, processor, options)

    def predict_file(self, options: TokenClassificationOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with `predicted_tags`, one for each word, to the jsonl file `output`."""

        def opened(model: nn.Module, folder: Path) -> Predict[dict[str, Any]]:
            tag = self.open_pipeline(model, stored_tokenizer(folder), options)
            return lambda rows: (row | {"predicted_tags": tag.tags_of(row[options.data.words])} for row in rows)

        return predict_rows(options, row_batches(options.data.eval, options.data.words, 32), load_model, opened)

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=ROWS.jsonl output=TAGS.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=ROWS.jsonl",
        ]


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
        self._longest = cast(CausalLM, model.backbone).geometry.max_length

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
        allowed = ("none", "simple", "first", "average", "max")
        check(aggregation_strategy in allowed, "aggregation_strategy", aggregation_strategy, ", ".join(allowed))
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
        scores = self._probabilities(tokens, f"text {number}")
        found: list[dict[str, Any]] = []
        for index, (row, (start, stop)) in enumerate(zip(scores, spans, strict=False)):
            start += len(text[start:stop]) - len(text[start:stop].lstrip())
            if start < stop:
                found.append({"scores": row, "index": index, "start": start, "end": stop})
        if strategy not in ("none", "simple"):
            words: list[list[dict[str, Any]]] = []
            for token in found:
                is_inside = words and token["start"] > 0 and not text[token["start"] - 1].isspace()
                words[-1].append(token) if is_inside else words.append([token])
            found = [_word(each, strategy) for each in words]
        labelled = []
        for each in found:
            best = int(each["scores"].argmax())
            entity, score = self._model.labels[best], float(each["scores"][best])
            where = {"word": text[each["start"] : each["end"]], "start": each["start"], "end": each["end"]}
            labelled.append({"entity": entity, "score": score, "index": each["index"], **where})
        return labelled if strategy == "none" else _groups(labelled, text)

    @torch.no_grad()
    def _probabilities(self, tokens: Sequence[int], name: str) -> Tensor:
        """[T, C] on the CPU, of no more tokens than the context has."""
        if not tokens or (len(tokens) > self._longest and not self._cuts):
            fix = "shorten it, or add data.on_too_long=cut_right"
            got, expected = f"{len(tokens)} tokens", f"1 to {self._longest}"
            raise DataError(f"{name} does not fit into the model", got=got, expected=expected, fix=fix)
        row = torch.tensor([tokens[: self._longest]], device=self._model.score.weight.device)
        return self._model.logits_at(row).softmax(-1).cpu()


def _word(tokens: list[dict[str, Any]], strategy: Aggregation) -> dict[str, Any]:
    """The tokens of a word as one, with scores by the strategy."""
    scores = torch.stack([each["scores"] for each in tokens])
    chosen = {"first": scores[0], "average": scores.mean(0), "max": scores[int(scores.max(-1).values.argmax())]}
    return {**tokens[0], "scores": chosen[strategy], "end": tokens[-1]["end"]}


def _groups(labelled: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Neighbours of one type as one entity, unless a B- begins the next; the score is their mean."""
    groups: list[list[dict[str, Any]]] = []
    for each in labelled:
        is_chunk = each["entity"][:2] in ("B-", "I-")
        kind = each["entity"][2:] if is_chunk else each["entity"]
        is_same = groups and groups[-1][0]["kind"] == kind and not each["entity"].startswith("B-")
        groups[-1].append(each | {"kind": kind}) if is_same else groups.append([each | {"kind": kind}])
    return [
        {
            "entity_group": group[0]["kind"],
            "score": sum(each["score"] for each in group) / len(group),
            "word": text[group[0]["start"] : group[-1]["end"]],
            "start": group[0]["start"],
            "end": group[-1]["end"],
        }
        for group in groups
    ]
