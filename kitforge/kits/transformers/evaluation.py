"""Questions with known answers: multiple choice by likelihood, and answers that are generated and compared.

A task is a jsonl file whose lines have one of four forms:

- `{"query", "choices", "gold"}`: which choice does the model find likeliest after the query?
- `{"context_options", "continuation", "gold"}`: after which context does it find the continuation likeliest?
- `{"context", "continuation"}`: is the continuation what it says itself?
- `{"question", "answer"}`: does it come to the number that follows #### in the answer?
"""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.errors import ConfigError, DataError, nearest
from kitforge.inference.continuations import Branches, score_branches
from kitforge.inference.engine import Engine
from kitforge.inference.text import InferenceOptions, TextEngine

Question = Mapping[str, Any]

FORMS: dict[str, dict[str, type]] = {
    "choices": {"query": str, "choices": list, "gold": int},
    "contexts": {"context_options": list, "continuation": str, "gold": int},
    "continuation": {"context": str, "continuation": str},
    "number": {"question": str, "answer": str},
}
_ENDINGS = (".jsonl", ".jsonl.gz")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
# Where a model begins a question of its own, its answer has ended.
_NEXT_QUESTION = "\n\nQuestion:"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionSet:
    """The questions of one file, all of one form."""

    name: str
    form: str
    questions: list[Question]


def load_task(name: str, folder: str | None = None) -> QuestionSet:
    """A task by its file, or by its name in `folder`. Raises ConfigError or DataError, the latter naming the line."""
    path = _find(name, folder)
    opened = gzip.open if path.suffix == ".gz" else open
    questions: list[Question] = []
    form: str | None = None
    with opened(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                form, question = _read(f"{path}:{number}", line, form)
                questions.append(question)
    if form is None:
        raise DataError(f"{path} has no questions", got="no lines", expected="one JSON object a line")
    return QuestionSet(name=path.name.partition(".jsonl")[0], form=form, questions=questions)


def evaluate_tasks(
    model: nn.Module, tokenizer: Tokenizer, sets: Sequence[QuestionSet], options: InferenceOptions
) -> dict[str, float]:
    """The metrics of each task as `task/metric`, and how many questions it has."""
    engine = Engine(model, options.engine, stop_ids=tokenizer.eos_ids)
    metrics: dict[str, float] = {}
    for task in sets:
        if task.form in ("choices", "contexts"):
            found = choose(model, tokenizer, task, options.engine.max_step_tokens)
        elif task.form == "continuation":
            found = _continue(model, tokenizer, task, engine)
        else:
            found = _calculate(TextEngine(engine, tokenizer), task, options)
        metrics |= {f"{task.name}/{name}": value for name, value in found.items()}
        metrics[f"{task.name}/questions"] = len(task.questions)
    return metrics


def choose(model: nn.Module, tokenizer: Tokenizer, task: QuestionSet, max_tokens: int) -> dict[str, float]:
    """Accuracy of the likeliest choice, and of the likeliest per byte."""
    trees: list[Branches] = []
    sizes: list[list[int]] = []
    for question in task.questions:
        if task.form == "choices":
            texts = [f" {choice}" for choice in question["choices"]]
            # One tree, so that the query is read once.
            trees.append(_tree(tokenizer, question["query"], texts))
        else:
            texts = [f" {question['continuation']}"] * len(question["context_options"])
            trees += [_tree(tokenizer, context, texts[:1]) for context in question["context_options"]]
        sizes.append([len(text.encode()) - 1 for text in texts])
    scores = iter([score for tree in score_branches(model, trees, max_tokens) for score in tree])
    right = right_per_byte = 0
    for question, lengths in zip(task.questions, sizes, strict=True):
        found = [next(scores) for _ in lengths]
        per_byte = [score / max(1, length) for score, length in zip(found, lengths, strict=True)]
        right += found.index(max(found)) == question["gold"]
        right_per_byte += per_byte.index(max(per_byte)) == question["gold"]
    count = len(task.questions)
    return {"accuracy": right / count, "accuracy_per_byte": right_per_byte / count}


def _continue(model: nn.Module, tokenizer: Tokenizer, task: QuestionSet, engine: Engine) -> dict[str, float]:
    """How often the likeliest tokens are those of the continuation, and how likely these are."""
    trees = [_tree(tokenizer, each["context"], [f" {each['continuation']}"]) for each in task.questions]
    scores = score_branches(model, trees, engine.options.max_step_tokens)
    wanted = [list(tree.branches[0]) for tree in trees]
    requests = {
        engine.submit(tree.stem, InferenceOptions(max_new_tokens=len(tokens))): place
        for place, (tree, tokens) in enumerate(zip(trees, wanted, strict=True))
    }
    said: list[list[int]] = [[] for _ in trees]
    while engine.has_work:
        for output in engine.step():
            said[requests[output.request]] += output.tokens
    right = sum(found == tokens for found, tokens in zip(said, wanted, strict=True))
    mean = sum(score[0] for score in scores) / len(scores)
    return {"accuracy": right / len(scores), "perplexity": math.exp(min(-mean, 700.0))}


def _calculate(texts: TextEngine, task: QuestionSet, options: InferenceOptions) -> dict[str, float]:
    """How often the number that is generated is the one that is wanted."""
    chosen = replace(options, stop=(*options.stop, _NEXT_QUESTION))
    requests = {
        texts.submit(f"Question: {each['question']}\nAnswer:", chosen, key=place): place
        for place, each in enumerate(task.questions)
    }
    said = [""] * len(task.questions)
    while texts.has_work:
        for piece in texts.step():
            if piece.error is not None:
                raise piece.error
            said[requests[piece.request]] += piece.text
    right = sum(
        number(found) is not None and number(found) == number(question["answer"])
        for found, question in zip(said, task.questions, strict=True)
    )
    return {"accuracy": right / len(said)}


def number(text: str) -> float | None:
    """The number behind ####, or else the last one."""
    _, mark, after = text.rpartition("####")
    found = _NUMBER.findall(after if mark else text)
    if not found:
        return None
    return float(found[0 if mark else -1].replace(",", ""))


def _tree(tokenizer: Tokenizer, context: str, continuations: Sequence[str]) -> Branches:
    """The space between a context and what follows belongs to what follows, as tokenizers have it."""
    return Branches(
        stem=tokenizer.encode(context.rstrip()), branches=[tokenizer.encode(text) for text in continuations]
    )


def _find(name: str, folder: str | None) -> Path:
    path = Path(name).expanduser()
    if name.endswith(_ENDINGS):
        if path.is_file():
            return path
        raise ConfigError("there is no such task", got=name, expected="a jsonl file")
    if folder is None:
        raise ConfigError(
            "a task is looked for by name in a folder", got=name, fix="add data.tasks=FOLDER, or name the file"
        )
    places = [Path(folder).expanduser() / f"{name}{ending}" for ending in _ENDINGS]
    for place in places:
        if place.is_file():
            return place
    known = [file.name.partition(".jsonl")[0] for file in places[0].parent.glob("*.jsonl*")]
    raise ConfigError(f"there is no task {name!r} in {folder}", fix=nearest(name, known) if known else None)


def _read(where: str, line: str, form: str | None) -> tuple[str, Question]:
    """The form and the question of a line."""
    try:
        question = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where} is not JSON", got=error) from None
    if not isinstance(question, dict):
        raise DataError(f"{where} is not a question", got=type(question).__name__, expected="a JSON object")
    for name, fields in FORMS.items():
        if all(type(question.get(field)) is kind for field, kind in fields.items()):
            _check(where, name, form, question)
            return name, question
    forms = "; ".join(", ".join(fields) for fields in FORMS.values())
    raise DataError(f"{where} has no form of a question", got=", ".join(question), expected=forms)


def _check(where: str, name: str, form: str | None, question: Question) -> None:
    if form is not None and name != form:
        raise DataError(f"{where} is of another form than the lines before it", got=name, expected=form)
    options = question.get("choices" if name == "choices" else "context_options")
    if name in ("choices", "contexts") and options is not None:
        if not options or not all(isinstance(option, str) and option for option in options):
            raise DataError(f"{where} has an option that is no text", got=options, expected="texts that are not empty")
        if not 0 <= question["gold"] < len(options):
            raise DataError(f"{where} has no option {question['gold']}", expected=f"gold from 0 to {len(options) - 1}")
    if name == "number" and number(question["answer"]) is None:
        raise DataError(f"{where} has no number in its answer", got=question["answer"][-60:])
