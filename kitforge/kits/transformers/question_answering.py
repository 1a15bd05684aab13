"""The task `question_answering`: the span of a passage that answers a question, or that there is none.

B windows, T tokens.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kitforge.core.checkpoint.load import find_checkpoint
from kitforge.core.nn.context import DropoutKey
from kitforge.core.nn.score_head import HEAD
from kitforge.data.document_shard import fingerprint_of
from kitforge.data.source import open_rows
from kitforge.data.text.answers import PassageQuestion, Window, Windows, answer_scores, question_of, questions_of
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check, check_least
from kitforge.foundation.device import copy_to
from kitforge.foundation.dtype import ExportDtype
from kitforge.foundation.errors import DataError, ModelError
from kitforge.foundation.log import logger
from kitforge.foundation.types import MicroBatch, OnInvalid, Sums
from kitforge.kits.transformers.labelling import HeadedModel, LabellingKit, LabellingOptions, LabellingPipeline
from kitforge.kits.transformers.rows import ClassifierTask, RaggedTokens, RowOptions, RowSplits, SplitRows, hold_out
from kitforge.kits.transformers.text_kit import PIPELINE_ROWS
from kitforge.models.catalog import FAMILIES
from kitforge.models.classifier_heads import QUESTION_ANSWERING
from kitforge.models.loading import OpenCheckpoint, StoredModel
from kitforge.report.notebook import Rows
from kitforge.trainer.run_folder import Run
from kitforge.trainer.task import BestMetric

LABELS = ("start", "end")
_log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionDataOptions(RowOptions):
    """Questions, passages, and the answers in them."""

    train: Any = None  # SQuAD's JSON, or a jsonl, csv or parquet file, a folder, a glob, a list of them, or rows
    question: str = "question"  # column of the question
    context: str = "context"  # column of the passage
    answers: str = "answers"  # column of the answers, with their beginnings; none: the passage does not answer
    batch_size: int = 16  # windows per step
    sequence_length: int = 384  # tokens of a window: a question and as much of its passage as there is room for
    stride: int = 128  # tokens of the passage that two neighbouring windows share
    max_answer_tokens: int = 30  # of a predicted answer
    on_invalid: OnInvalid = "refuse"  # answers that do not occur in their passage, questions that fill a window

    def __post_init__(self) -> None:
        RowOptions.__post_init__(self)
        check_least("data", self, 1, "stride", "max_answer_tokens")

    @property
    def columns(self) -> tuple[str, str, str]:
        """Those of question, passage and answers."""
        return self.question, self.context, self.answers


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnsweringOptions(LabellingOptions):
    """All options of the task."""

    task: str = "question_answering"
    data: QuestionDataOptions = field(default_factory=QuestionDataOptions)

    def __post_init__(self) -> None:
        LabellingOptions.__post_init__(self)
        # A run records both.
        is_span = self.labels in ((), LABELS) and self.problem_type in (None, "single_label_classification")
        check(is_span, "labels", list(self.labels), "none, and problem_type=null: answers are spans")


class QuestionRows(SplitRows):
    """The windows of questions in memory."""

    def __init__(self, questions: Sequence[tuple[PassageQuestion, Sequence[Window]]], pad_id: int) -> None:
        self._pad_id, self.questions = pad_id, [question for question, _ in questions]
        self.windows = [replace(each, question=at) for at, (_, windows) in enumerate(questions) for each in windows]
        self._tokens = RaggedTokens(each.tokens for each in self.windows)
        self.lengths = self._tokens.lengths
        self._bounds = np.array([[*each.passage, *each.target] for each in self.windows], np.int64).reshape(-1, 4)
        self.fingerprint = fingerprint_of(*self._tokens.identity(), self._bounds.tobytes())

    def batch(self, rows: NDArray[np.int64]) -> dict[str, Tensor]:
        """Windows padded on the right: tokens [B, T], their numbers of tokens `sizes` [B], first and end of the passage
        and first and last token of the answer (-1: none) as `bounds` [B, 4], and the `rows`. Without rows, one of size
        1."""
        sizes = torch.from_numpy(self.lengths[rows]) if len(rows) else torch.ones(1, dtype=torch.int64)
        bounds = torch.from_numpy(self._bounds[rows]) if len(rows) else torch.tensor([[0, 1, -1, -1]])
        tokens = self._tokens.padded(rows, self._pad_id)
        return {"tokens": tokens, "sizes": sizes, "bounds": bounds, "rows": torch.from_numpy(rows)}


def read_questions(
    train: object, evaluation: object, tokenizer: Tokenizer, options: QuestionAnsweringOptions, _known: tuple[str, ...]
) -> RowSplits[QuestionRows]:
    """Read questions and cut their passages into windows. Raises DataError naming a question that is unusable."""
    data = options.data
    windows = Windows(tokenizer, data.sequence_length, data.stride)

    def read(spec: object) -> list[tuple[PassageQuestion, list[Window]]]:
        found, num_skipped = list[tuple[PassageQuestion, list[Window]]](), 0
        rows = (pair for shard in (open_rows(spec) if spec is not None else ()) for pair in shard.rows())
        for location, values in (each for at, row in rows for each in questions_of(row, data.columns, at)):
            try:
                question = question_of(values, data.columns, location)
                found.append((question, windows.of(question, location)))
            except DataError:
                if data.on_invalid == "refuse":
                    raise
                num_skipped += 1
        if spec is not None and not found:
            raise DataError("there are no questions", got=f"{num_skipped} unusable ones", expected="at least one")
        if num_skipped:
            _log.warning("%d questions: %d more were skipped", len(found), num_skipped)
        return found

    parts = hold_out(read(train), read(evaluation) or None, data.eval_fraction, options.seed)
    own, held = (QuestionRows(each, tokenizer.pad_id) for each in parts)
    return RowSplits(train=own, eval=held, labels=LABELS)


class QuestionAnswerer(HeadedModel):
    """A network with a linear head [2, dim] and bias on the output of every token, as `*ForQuestionAnswering` of
    transformers."""

    has_bias = True

    def logits_at(self, tokens: Tensor, sizes: Tensor, firsts: Tensor, dropout: DropoutKey | None = None) -> Tensor:
        """Logits [B T, 2] of windows [B, T] of these sizes [B], whose passages begin at `firsts` [B], one row after
        another: no view, which FSDP cannot hook."""
        return self.pooled_scores(tokens, self.paired_context(tokens, sizes, firsts, dropout)).float()

    def null_index(self, sizes: Tensor) -> Tensor:
        """The token [B] that stands for no answer: the first of a window, or to a causal network, which has read
        nothing there, the last one."""
        return sizes - 1 if self.language_model.geometry.is_causal else torch.zeros_like(sizes)

    def log_probabilities(self, batch: Mapping[str, Tensor], dropout: DropoutKey | None = None) -> Tensor:
        """Of the windows of `QuestionRows.batch` the log-probabilities [B, T, 2] of each token to be the first and the
        last one of the answer, among those of the passage and the one that stands for no answer."""
        device = self.score.weight.device
        tokens, sizes, bounds = (copy_to(batch[name], device) for name in ("tokens", "sizes", "bounds"))
        logits = torch.unflatten(self.logits_at(tokens, sizes, bounds[:, 0], dropout), 0, tokens.shape)
        positions = torch.arange(tokens.shape[1], device=device)
        is_passage = (positions >= bounds[:, :1]) & (positions < bounds[:, 1:2])
        is_open = is_passage | (positions == self.null_index(sizes).unsqueeze(1))
        return logits.masked_fill(~is_open.unsqueeze(2), -torch.inf).log_softmax(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a window says: its likeliest spans as (log-probability, first character, end), and that of no answer."""

    spans: list[tuple[float, int, int]]
    null: float


def best_answers(log_probabilities: Tensor, null: int, window: Window, longest: int, count: int) -> Answers:
    """The answers of a window by the log-probabilities [T, 2] of its tokens."""
    first, stop = window.passage
    starts, ends = log_probabilities[first:stop].double().unbind(1)
    sums = starts.unsqueeze(1) + ends
    # An answer ends where it begins or behind, and is not too long.
    sums = sums.masked_fill(~torch.ones_like(sums, dtype=torch.bool).triu().tril(longest - 1), -torch.inf).flatten()
    best = sums.topk(min(count, len(sums)))
    pairs = (divmod(index, stop - first) for index in best.indices.tolist())
    spans = [
        (score, window.spans[start][0], window.spans[end][1])
        for score, (start, end) in zip(best.values.tolist(), pairs, strict=True)
        if score > -torch.inf
    ]
    return Answers(spans=spans, null=float(log_probabilities[null].double().sum()))


def merged_answers(windows: Sequence[Answers], count: int, *, may_be_none: bool) -> list[tuple[float, int, int]]:
    """The likeliest spans over all windows of a question, a span of several with its best score; with `may_be_none`
    also (0, 0), as likely as in the window where it is least likely."""
    best: dict[tuple[int, int], float] = {}
    for score, start, end in (span for each in windows for span in each.spans):
        best[start, end] = max(score, best.get((start, end), score))
    if may_be_none:
        best[0, 0] = min(each.null for each in windows)
    return heapq.nlargest(count, ((score, *span) for span, score in best.items()))


class QuestionAnsweringTask(ClassifierTask):
    """Cross entropy of the first and the last token of the answer. A micro-batch is that of `QuestionRows.batch`."""

    _options: QuestionAnsweringOptions

    def metric_for_best(self) -> BestMetric:
        return BestMetric(name="eval/f1", mode="max")

    def count(self, step: Sequence[MicroBatch]) -> Sums:
        """The windows of this rank: the denominator of the mean loss."""
        rows = torch.tensor(sum(len(each["rows"]) for each in step))
        tokens = torch.stack([each["sizes"].sum() for each in step]).sum()
        return {"loss": rows.float(), "samples": rows, "input_tokens": tokens}

    def logits(
        self, model: nn.Module, micro_batch: MicroBatch, dropout_key: DropoutKey | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities [B, T, 2], the first and the last token of the answer [B, 2], and weights [B]."""
        network = cast(QuestionAnswerer, model)
        found = network.log_probabilities(micro_batch, dropout_key)
        targets, sizes = (copy_to(micro_batch[name], found.device) for name in ("bounds", "sizes"))
        targets = torch.where(targets[:, 2:] < 0, network.null_index(sizes).unsqueeze(1), targets[:, 2:])
        return found, targets, found.new_full((len(found),), float(len(micro_batch["rows"]) > 0))

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> Sums:
        """The sums of the cross entropies, a mean of first and last token, and of windows with both right."""
        dropout_key = self.dropout_key(micro_batch) if model.training else None
        return span_sums(*self.logits(model, micro_batch, dropout_key))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """eval/loss and eval/accuracy over the windows, eval/exact_match and eval/f1 over the questions, from 0 to 100
        by SQuAD's rules. A question whose windows are on several ranks is answered from all of them."""
        if not self._num_eval_rows:
            return {}
        rows, own, data = self._rows.eval, dict[int, Answers](), self._options.data
        totals = torch.zeros(3, dtype=torch.float64)
        with self.shown(self.eval_micro_batches(model)) as batches:
            for each in batches:
                found, targets, weights = self.logits(model, each, None)
                sums = span_sums(found, targets, weights)
                totals += torch.stack([sums["loss"], sums["accuracy"], weights.sum()]).double().cpu()
                null = cast(QuestionAnswerer, model).null_index(each["sizes"]).tolist()
                for number, scores, none in zip(each["rows"].tolist(), found.cpu(), null, strict=False):
                    own[number] = best_answers(scores, none, rows.windows[number], data.max_answer_tokens, 1)
        totals = self._world.sum({"totals": totals})["totals"]
        answers: dict[int, dict[int, Answers]] = {}
        for number, answer in (pair for part in self._world.all_gather_object(own) for pair in part.items()):
            answers.setdefault(rows.windows[number].question, {})[number] = answer
        scores = np.zeros(2)
        for index, windows in answers.items():
            question = rows.questions[index]
            ((_, start, end),) = merged_answers([*windows.values()], 1, may_be_none=True)
            scores += answer_scores(question.context[start:end], [text for text, _ in question.answers])
        exact, f1 = 100.0 * scores / len(answers)
        means = {"loss": float(totals[0] / totals[2]), "accuracy": float(totals[1] / totals[2])}
        return {f"eval/{name}": value for name, value in {**means, "exact_match": exact, "f1": f1}.items()}


def span_sums(found: Tensor, targets: Tensor, weights: Tensor) -> Sums:
    """See `QuestionAnsweringTask.loss`; of what its `logits` gives."""
    losses = -found.gather(1, targets.unsqueeze(1)).squeeze(1).mean(1)
    right = (found.detach().argmax(1) == targets).all(1).to(losses)
    return {"loss": (losses * weights).sum(), "accuracy": (right * weights).sum()}


class QuestionAnsweringPipeline(LabellingPipeline[QuestionAnswerer]):
    """Answers questions, in the shapes of Hugging Face's pipeline."""

    def __init__(self, model: QuestionAnswerer, tokenizer: Tokenizer, options: QuestionAnsweringOptions) -> None:
        self._model, self._tokenizer, self._data = model.eval(), tokenizer, options.data
        limit = min(options.data.sequence_length, model.language_model.geometry.max_length)
        self._windows = Windows(tokenizer, limit, options.data.stride)

    def __call__(  # type: ignore[override]
        self,
        question: str | Mapping[str, str] | Sequence[Mapping[str, str]],
        context: str | None = None,
        top_k: int = 1,
        handle_impossible_answer: bool = False,
    ) -> Any:
        """`{"score", "start", "end", "answer"}` of a question and its passage, or of a dict with both, or a list of
        these for a list of dicts; with another `top_k` a list of that many. The score is the product of the
        probabilities of both ends in a window; with `handle_impossible_answer` the empty answer takes part. Raises
        DataError for a question that leaves no room for its passage."""
        if isinstance(question, str):
            return self._answer(question, str(context), top_k, may_be_none=handle_impossible_answer)
        rows = [question] if isinstance(question, Mapping) else list(question)
        found = Rows(
            self._answer(row[self._data.question], row[self._data.context], top_k, may_be_none=handle_impossible_answer)
            for row in rows
        )
        return found[0] if isinstance(question, Mapping) else found

    def predictions(self, values: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """`predicted_answer`, empty where the passage has none, and its `score` of each row of question and passage."""
        for found in self(values, handle_impossible_answer=True):
            yield {"predicted_answer": found["answer"], "score": found["score"]}

    @torch.no_grad()
    def _answer(self, question: str, context: str, top_k: int, *, may_be_none: bool) -> Any:
        asked = PassageQuestion(question=question, context=context, answers=())
        windows, answers = self._windows.of(asked, f"{question!r:.60}"), list[Answers]()
        rows = QuestionRows([(asked, windows)], self._tokenizer.pad_id)
        for start in range(0, len(windows), PIPELINE_ROWS):
            numbers = np.arange(start, min(start + PIPELINE_ROWS, len(windows)))
            batch = rows.batch(numbers)
            found, null = self._model.log_probabilities(batch).cpu(), self._model.null_index(batch["sizes"]).tolist()
            for number, scores, none in zip(numbers.tolist(), found, null, strict=True):
                longest = self._data.max_answer_tokens
                answers.append(best_answers(scores, none, windows[number], longest, top_k))
        best = [
            {"score": float(np.exp(score)), "start": start, "end": end, "answer": context[start:end]}
            for score, start, end in merged_answers(answers, top_k, may_be_none=may_be_none)
        ]
        return best[0] if top_k == 1 else best


class QuestionAnswering(LabellingKit[QuestionAnsweringOptions]):
    """The task `question_answering`."""

    OPTIONS, PIPELINE = QuestionAnsweringOptions, QuestionAnsweringPipeline
    FURTHER_KINDS = ("encoder",)
    MODEL, TASK, SUFFIX = QuestionAnswerer, QuestionAnsweringTask, QUESTION_ANSWERING
    READ, COLUMN, LABELLED, OUTPUT = staticmethod(read_questions), "context", "passages", "ANSWERS.jsonl"
    TEXTS, PREDICTS_ROWS = ("question", "context"), True

    def dry_rows(self, options: QuestionAnsweringOptions) -> list[Any]:
        """A question of an eighth of a window, and a passage that fills the rest."""
        data = options.data
        passage, answer = "a" * data.sequence_length, {"text": ["a"], "answer_start": [0]}
        return [{data.question: "b" * (data.sequence_length // 8), data.context: passage, data.answers: answer}]

    def open_model(self, folder: Path, open_run: OpenCheckpoint = find_checkpoint) -> StoredModel:
        """See `LabellingKit`; published folders give both outputs other names."""
        stored = super().open_model(folder, open_run)
        return replace(stored, labels=LABELS) if HEAD in stored.head else stored

    def save(
        self, source: nn.Module | Run | Path, folder: Path, processor: Any, dtype: ExportDtype | None = None
    ) -> None:
        """See `LabellingKit`. Raises ModelError for a language model, whose class there reads another token for no
        answer."""
        home = source.folder if isinstance(source, Run) else source
        if isinstance(home, Path) and FAMILIES[family := self.open_model(home).config.family].kind != "encoder":
            raise ModelError("only an encoder is exported for question answering", got=family, expected="bert")
        super().save(source, folder, processor, dtype)
