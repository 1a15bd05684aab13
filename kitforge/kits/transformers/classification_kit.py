"""The wiring of `text_classification`: from options and objects to a run, and from a folder to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.errors import DataError, ModelError
from kitforge.kits.kit import LoadModel, RunInputs
from kitforge.kits.transformers.classification import (
    LabelledRows,
    SequenceClassifier,
    TextClassificationOptions,
    TextClassificationTask,
    read_data,
)
from kitforge.kits.transformers.labelling import LabelledData
from kitforge.kits.transformers.labelling_kit import LabellingKit, predict_rows
from kitforge.kits.transformers.programs import export_programs
from kitforge.kits.transformers.rows import last_token, probabilities
from kitforge.models.loading import SEQUENCE_CLASSIFIER

Inputs: TypeAlias = RunInputs[Tokenizer]
# Rows that a pipeline computes at once.
_BATCH = 32


@final
class TextClassification(LabellingKit[TextClassificationOptions]):
    """The task `text_classification`."""

    OPTIONS = TextClassificationOptions

    MODEL, TASK, SUFFIX = SequenceClassifier, TextClassificationTask, SEQUENCE_CLASSIFIER

    def read_data(
        self,
        train: object,
        evaluation: object,
        tokenizer: Tokenizer,
        options: TextClassificationOptions,
        known: tuple[str, ...],
    ) -> LabelledData[LabelledRows]:
        """Texts and labels."""
        return read_data(train, evaluation, tokenizer, options, known)

    def export_program(self, options: TextClassificationOptions) -> list[Path]:
        """Write the programs of the model under `options.checkpoint` into the folder `options.output_dir`."""
        return export_programs(self, options)

    def open_pipeline(
        self, model: nn.Module, processor: Tokenizer, options: TextClassificationOptions
    ) -> TextClassificationPipeline:
        """What labels texts."""
        return TextClassificationPipeline(model, processor, options)

    def predict_file(self, options: TextClassificationOptions, load_model: LoadModel) -> Path:
        """Write each row of `data.eval` with `predicted_label` and `score` to the jsonl file `output`; of a regression
        with its `score`, or with the `scores` of several outputs by name."""

        def open_labeller(model: nn.Module, tokenizer: Tokenizer) -> Callable[[list[dict[str, Any]]], list[Any]]:
            classify = self.open_pipeline(model, tokenizer, options)

            def label(rows: list[dict[str, Any]]) -> list[Any]:
                texts = [str(row[options.data.text]) for row in rows]
                if cast(SequenceClassifier, model).problem_type == "regression":
                    return [_numbers(each) for each in classify(texts, top_k=None)]
                found = classify(texts)
                return [{"predicted_label": each["label"], "score": each["score"]} for each in found]

            return label

        return predict_rows(options, options.data.text, load_model, open_labeller)

    def next_steps(self, folder: Path) -> list[str]:
        """Commands to try after a run."""
        return [
            f"kitforge predict checkpoint={folder} data.eval=ROWS.jsonl output=LABELS.jsonl",
            f"kitforge evaluate checkpoint={folder} data.eval=ROWS.jsonl",
        ]


def _numbers(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The outputs of a regression as columns of a row."""
    scores = {each["label"]: each["score"] for each in sorted(found, key=lambda each: str(each["label"]))}
    return {"scores": scores} if len(scores) > 1 else {"score": found[0]["score"]}


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
        tokens = [self._tokenizer.encode_prompt(text) for text in rows]
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
        pad_id = self._tokenizer.pad_id if self._model.pad_id is False else self._model.pad_id
        ends = torch.tensor([last_token(row, pad_id) for row in cut])
        logits = self._model.logits_at(tokens.to(device), ends.to(device))
        return probabilities(logits, self._model.problem_type).cpu()
