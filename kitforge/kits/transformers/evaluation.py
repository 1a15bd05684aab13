"""Benchmarks: multiple choice by log-likelihood, numbers by generation, texts by perplexity.

Scores equal those of lm-evaluation-harness 0.4: the same tokens, metrics and standard errors.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any, Literal, TypeAlias, cast

from torch import nn

from kitforge.core.nn.causal_lm import CausalLM
from kitforge.data.text.continuation import decode_continuation, encode_pair, prefix_token
from kitforge.data.tokenizers.protocol import Tokenizer, document_frame
from kitforge.foundation.errors import DataError, KitforgeError, ModelError
from kitforge.foundation.log import logger
from kitforge.inference.choice_scoring import ChoiceBatch, ChoiceScore, choice_logprobs
from kitforge.inference.engine import Engine
from kitforge.inference.folder_defaults import with_folder_defaults
from kitforge.inference.text_engine import InferenceOptions, TextEngine
from kitforge.kits.transformers.questions import Question, QuestionSet, final_number

# Stop string: the model begins another question.
_NEXT_QUESTION = "\n\nQuestion:"
_WORD = re.compile(r"\s+")
_log = logger(__name__)

OnTooLong: TypeAlias = Literal["refuse", "cut_left"]
# A context and its continuation in tokens.
Pair: TypeAlias = tuple[list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionResult:
    """The result of one question."""

    row: dict[str, Any]  # of the log: location, scores, prediction, gold
    values: dict[str, float]  # averaged to the metrics of the task


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Metrics by `task/metric`, and the log rows of the questions by task."""

    metrics: dict[str, float]
    rows: dict[str, list[dict[str, Any]]]


class Evaluator:
    """Evaluates one model. Questions beyond the context window are refused, or cut on the left and counted."""

    def __init__(
        self, model: nn.Module, tokenizer: Tokenizer, options: InferenceOptions, on_too_long: OnTooLong = "refuse"
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._options = options
        self._cuts = on_too_long == "cut_left"
        self._engine = Engine(model, options.engine, stop_ids=tokenizer.eos_ids)
        self._limit = cast(CausalLM, model).geometry.max_length
        self.cut: set[str] = set()  # locations of the questions cut on the left

    def evaluate(self, sets: Sequence[QuestionSet]) -> EvaluationResult:
        """The metrics of every task with standard errors and the number of questions."""
        forms: dict[str, Callable[[QuestionSet], list[QuestionResult]]] = {
            "choices": self._choose,
            "contexts": self._choose,
            "continuation": self._continue,
            "number": self._calculate,
            "text": self._read,
        }
        metrics: dict[str, float] = {}
        rows: dict[str, list[dict[str, Any]]] = {}
        for task in sets:
            self.cut.clear()
            results = forms[task.form](task)
            found = perplexities(results) if task.form == "text" else means(results)
            metrics |= {f"{task.name}/{name}": value for name, value in found.items()}
            metrics[f"{task.name}/questions"] = len(results)
            rows[task.name] = [{"task": task.name, **result.row} for result in results]
            if self._cuts:
                metrics[f"{task.name}/cut_questions"] = len(self.cut)
            if self.cut:
                _log.warning(
                    "%s: %d of %d questions do not fit into the model's %d positions and are cut on the left",
                    task.name,
                    len(self.cut),
                    len(results),
                    self._limit,
                )
        return EvaluationResult(metrics=metrics, rows=rows)

    def _choose(self, task: QuestionSet) -> list[QuestionResult]:
        """Multiple choice: whether the gold choice or context is the likeliest, in total and per byte."""
        asked, sizes = [], []
        for question in task.questions:
            values = question.values
            if task.form == "choices":
                texts = [(values["query"], choice) for choice in values["choices"]]
            else:
                texts = [(context, values["continuation"]) for context in values["context_options"]]
            asked.append((question.location, [(context, f" {continuation}") for context, continuation in texts]))
            sizes.append([len(text.encode()) for _, text in texts])
        results = []
        for question, found, lengths in zip(task.questions, self.score(asked), sizes, strict=True):
            scores = [each.logprob for _, each in found]
            per_byte = [score / length for score, length in zip(scores, lengths, strict=True)]
            likeliest, likeliest_per_byte = scores.index(max(scores)), per_byte.index(max(per_byte))
            gold = question.values["gold"]
            results.append(
                QuestionResult(
                    row={
                        **_location(question),
                        "scores": scores,
                        "prediction": likeliest,
                        "prediction_per_byte": likeliest_per_byte,
                        "gold": gold,
                    },
                    values={
                        "accuracy": float(likeliest == gold),
                        "accuracy_per_byte": float(likeliest_per_byte == gold),
                    },
                )
            )
        return results

    def _continue(self, task: QuestionSet) -> list[QuestionResult]:
        """Whether greedy decoding gives the continuation, and the log-probability of the continuation."""
        asked = [
            (each.location, [(each.values["context"], f" {each.values['continuation']}")]) for each in task.questions
        ]
        results = []
        for question, [((prefix, tokens), score)] in zip(task.questions, self.score(asked), strict=True):
            said, gold = (decode_continuation(self._tokenizer, prefix, each) for each in (score.greedy, tokens))
            row = {**_location(question), "scores": [score.logprob], "prediction": said, "gold": gold}
            values = {"accuracy": float(score.is_greedy(tokens)), "logprob": score.logprob}
            results.append(QuestionResult(row=row, values=values))
        return results

    def _calculate(self, task: QuestionSet) -> list[QuestionResult]:
        """Exact match of the generated number."""
        options = with_folder_defaults(self._options, self._tokenizer.generation_config)
        chosen = replace(options, stop=(*options.stop, _NEXT_QUESTION))
        said = self.generate(
            [(each.location, (f"Question: {each.values['question']}\nAnswer:", chosen)) for each in task.questions]
        )
        results = []
        for question, text in zip(task.questions, said, strict=True):
            found, gold = final_number(text), final_number(question.values["answer"])
            is_right = found is not None and found == gold
            row = {**_location(question), "generated_text": text, "prediction": found, "gold": gold}
            results.append(QuestionResult(row=row, values={"accuracy": float(is_right)}))
        return results

    def _read(self, task: QuestionSet) -> list[QuestionResult]:
        """Log-likelihood of whole texts."""
        texts = [(each.location, each.values["text"]) for each in task.questions]
        results = []
        for question, (_, text), logprob in zip(task.questions, texts, self.read(texts), strict=True):
            words, size = len(_WORD.split(text)), len(text.encode())
            values = {"logprob": logprob, "bytes": float(size), "words": float(words)}
            results.append(QuestionResult(row={**_location(question), **values}, values=values))
        return results

    def score(self, asked: Sequence[tuple[str, Sequence[tuple[str, str]]]]) -> Iterator[list[tuple[Pair, ChoiceScore]]]:
        """The tokens and scores of the contexts and continuations of each question."""
        pairs = [self._pairs(location, texts) for location, texts in asked]
        for own, found in zip(pairs, self._scores([location for location, _ in asked], pairs), strict=True):
            yield list(zip(own, found, strict=True))

    def read(self, asked: Sequence[tuple[str, str]]) -> list[float]:
        """Log-likelihood of whole texts, in windows that predict every token once (`loglikelihood_rolling`)."""
        before, _ = document_frame(self._tokenizer)
        before = before or [prefix_token(self._tokenizer)]
        windows = [_windows(before, self._tokenizer.encode(text), self._limit) for _, text in asked]
        found = self._scores([location for location, _ in asked], windows)
        return [sum(each.logprob for each in scores) for scores in found]

    def generate(self, asked: Sequence[tuple[str, tuple[str, InferenceOptions]]]) -> list[str]:
        """What the model says after each prompt."""
        texts = TextEngine(self._engine, self._tokenizer)
        requests = {self._submit(texts, *each, key=index): index for index, each in enumerate(asked)}
        said = [""] * len(asked)
        while texts.has_work:
            for delta in texts.step():
                if delta.error is not None:
                    raise delta.error
                index = requests[delta.request]
                said[index] += delta.text
                if delta.finish_reason == "diverged":
                    raise _diverged(asked[index][0])
        return said

    def _submit(self, texts: TextEngine, location: str, prompt: tuple[str, InferenceOptions], key: int) -> int:
        tokens, options = self._tokenizer.encode_prompt(prompt[0]), prompt[1]
        room = self._limit - options.max_new_tokens
        if self._cuts and 0 < room < len(tokens):
            self.cut.add(location)
            tokens = tokens[-room:]
        try:
            return texts.submit(tokens, options, key=key)
        except KitforgeError as error:
            raise DataError(f"{location}: {error}") from None

    def _pairs(self, location: str, texts: Sequence[tuple[str, str]]) -> list[Pair]:
        """Contexts and continuations as tokens within the context window."""
        pairs = []
        for context, continuation in texts:
            prefix, target = encode_pair(self._tokenizer, context, continuation)
            if not prefix or not target:
                raise DataError(
                    f"{location} has a context or a continuation without a token of its own",
                    got=f"{len(prefix)} and {len(target)} tokens of {context[-30:]!r} and {continuation[:30]!r}",
                    expected="at least one token each",
                )
            excess = len(prefix) + len(target) - (self._limit + 1)
            if excess > 0:
                self._check_excess(location, excess, len(target))
                self.cut.add(location)
            pairs.append((prefix[max(0, excess) :], target))
        return pairs

    def _check_excess(self, location: str, excess: int, continuation: int) -> None:
        """Raise DataError for a question that is too long, unless its context may be cut and keeps a token."""
        if self._cuts and continuation <= self._limit:
            return
        raise DataError(
            f"{location} is longer than the model allows",
            got=f"{self._limit + 1 + excess} tokens, {continuation} of them in the continuation",
            expected=f"at most {self._limit + 1}, of which the last is only predicted",
            fix="leave it out"
            if self._cuts
            else "leave it out, or data.on_too_long=cut_left, which drops the beginning of its context",
        )

    def _scores(self, locations: Sequence[str], questions: Sequence[Sequence[Pair]]) -> Iterator[list[ChoiceScore]]:
        """The scores of the continuations of each question. Shared contexts are computed once."""
        trees = [
            ChoiceBatch(prefix=prefix, continuations=[target for _, target in pairs])
            for each in questions
            for prefix, pairs in groupby(each, key=lambda pair: pair[0])
        ]
        num_tokens = self._options.engine.batched_tokens(next(self._model.parameters()).device.type)
        scores = (score for tree in choice_logprobs(self._model, trees, num_tokens) for score in tree)
        for location, pairs in zip(locations, questions, strict=True):
            found = list(islice(scores, len(pairs)))
            if any(math.isnan(score.logprob) for score in found):
                raise _diverged(location)
            yield found


def means(results: Sequence[QuestionResult]) -> dict[str, float]:
    """The mean of every value, with its standard error for two questions or more. The mean log-probability becomes a
    perplexity, its error to first order."""
    metrics: dict[str, float] = {}
    for name in results[0].values:
        values = [result.values[name] for result in results]
        mean, error = sum(values) / len(values), None
        if len(values) > 1:
            error = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
        if name == "logprob":
            mean = math.exp(min(-mean, 700.0))
            name, error = "perplexity", None if error is None else mean * error
        metrics[name] = mean
        if error is not None:
            metrics[f"{name}_stderr"] = error
    return metrics


def perplexities(results: Sequence[QuestionResult]) -> dict[str, float]:
    """Perplexity per word and per byte, and bits per byte, over all texts together."""
    logprob, words, size = (sum(result.values[name] for result in results) for name in ("logprob", "words", "bytes"))
    return {
        "word_perplexity": math.exp(min(-logprob / words, 700.0)),
        "byte_perplexity": math.exp(min(-logprob / size, 700.0)),
        "bits_per_byte": -logprob / size / math.log(2),
    }


def _windows(before: list[int], tokens: list[int], limit: int) -> list[Pair]:
    """Windows of a text that predict each token once. All but the first have as much context as fits, at least one
    token."""
    first = min(len(tokens), limit - len(before) + 1)
    windows = [(before, tokens[:first])]
    for start in range(first, len(tokens), limit):
        end = min(len(tokens), start + limit)
        windows.append((tokens[max(0, end - limit - 1) : start], tokens[start:end]))
    return windows


def _location(question: Question) -> dict[str, Any]:
    return {"file": question.file, "line": question.line}


def _diverged(location: str) -> ModelError:
    return ModelError(
        "the model gives a log-probability that is not finite",
        got=f"NaN or infinity at {location}",
        expected="finite logits",
        fix="take a checkpoint from before the training diverged",
    )
