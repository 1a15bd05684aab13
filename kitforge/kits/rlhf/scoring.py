"""What an answer is worth: a trained model, a function of the caller's, or a check against the known answer."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from kitforge.data.dialogues import Response
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError, TrainingError, nearest
from kitforge.kits.rlhf.collate import padded
from kitforge.kits.rlhf.order import at_once
from kitforge.kits.rlhf.scalar_model import ScalarModel
from kitforge.trainer.run import Run

BATCH_SIZE = 32
# A number as people write it: with a sign, separators of thousands and decimals.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer to a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # with the end token, where it has one
    has_ended: bool
    columns: Mapping[str, Any]  # of the prompt's row
    learnt: tuple[bool, ...] = ()  # which tokens the policy wrote itself; (): all

    @property
    def spoken(self) -> tuple[int, ...]:
        """Its tokens without the end token."""
        return self.tokens[:-1] if self.has_ended else self.tokens


class Scorer(ABC):
    """Scores answers."""

    @abstractmethod
    def scores(self, answers: Sequence[Answer]) -> list[float | list[float]]:
        """A number for each answer, or one for each of its tokens."""


@final
class ModelScorer(Scorer):
    """A reward model, which reads prompt and answer as tokens; it must have been trained on the same ones."""

    def __init__(self, model: ScalarModel, tokenizer: Tokenizer) -> None:
        self.model = model
        self._tokenizer = tokenizer

    @torch.no_grad()
    def scores(self, answers: Sequence[Answer]) -> list[float | list[float]]:
        """Normalised scores after each answer's last token."""
        found: list[float | list[float]] = [0.0] * len(answers)
        device = self.model.score.weight.device
        whole = [(*each.prompt, *each.tokens) for each in answers]
        for places in at_once([len(each) for each in whole], BATCH_SIZE, device):
            texts = [Response(tokens=whole[place], learnt=(False,) * len(whole[place])) for place in places]
            batch = padded(texts, self._tokenizer.pad_id)
            scores = self.model.at(batch["tokens"].to(device), batch["ends"].to(device))
            for place, score in zip(places, self.model.normalised(scores).tolist(), strict=True):
                found[place] = score
        return found


@final
class FunctionScorer(Scorer):
    """A function `f(*, prompts, completions, prompt_tokens, completion_tokens, **columns)`, plain or async.

    Texts and tokens are without the end token, and each column is a list as long as they are. It names the arguments
    that it wants. It returns a number for each answer, a list with one for each token, or a mapping with "score".
    """

    def __init__(self, function: Callable[..., Any], tokenizer: Tokenizer) -> None:
        self._function = function
        self._tokenizer = tokenizer
        self._name = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        self._wants_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        self._wanted = {each.name for each in parameters}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]

    def scores(self, answers: Sequence[Answer]) -> list[float | list[float]]:
        """What the function says. Raises TrainingError for what it raises, and for answers that are no scores."""
        arguments = self._arguments(answers)
        try:
            found = self._function(**arguments)
            if inspect.isawaitable(found):
                found = asyncio.run(_awaited(found))
        except KitforgeError:
            raise
        except Exception as error:
            raise TrainingError(f"the reward function {self._name!r} failed", got=repr(error)) from error
        values = list(found)
        if len(values) != len(answers):
            raise TrainingError(
                f"the reward function {self._name!r} gave the wrong number of scores",
                got=len(values),
                expected=f"{len(answers)}, one for each completion",
            )
        return [self._score(value, answer) for value, answer in zip(values, answers, strict=True)]

    def _arguments(self, answers: Sequence[Answer]) -> dict[str, Any]:
        known: dict[str, Any] = {
            "prompts": [self._tokenizer.decode(each.prompt) for each in answers],
            "completions": [self._tokenizer.decode(each.spoken) for each in answers],
            "prompt_tokens": [list(each.prompt) for each in answers],
            "completion_tokens": [list(each.spoken) for each in answers],
        }
        columns = dict.fromkeys(name for each in answers for name in each.columns)
        known = {name: [each.columns.get(name) for each in answers] for name in columns} | known
        if missing := [name for name in self._needed if name not in known]:
            raise DataError(
                f"the reward function {self._name!r} reads a column that the prompts do not have",
                got=f"columns {', '.join(columns)}",
                expected=", ".join(missing),
                fix=f"data.columns.{missing[0]}=NAME; {nearest(missing[0], columns)}",
            )
        return {name: value for name, value in known.items() if self._wants_all or name in self._wanted}

    def _score(self, value: Any, answer: Answer) -> float | list[float]:
        if isinstance(value, Mapping):
            value = value.get("score")
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        numbers = list(value) if isinstance(value, (list, tuple)) else [value]
        try:
            plain = [float(number) for number in numbers]
        except (TypeError, ValueError):
            plain = [math.nan]
        if not all(map(math.isfinite, plain)):
            raise TrainingError(
                f"the reward function {self._name!r} gave something that is no score",
                got=repr(value),
                expected="a finite number, a list of them or a mapping with 'score'",
            )
        if not isinstance(value, (list, tuple)):
            return plain[0]
        wanted = len(answer.tokens) - answer.has_ended
        if len(plain) != wanted:
            raise TrainingError(
                f"the reward function {self._name!r} gave the wrong number of scores for a completion",
                got=len(plain),
                expected=f"{wanted}, one for each token",
            )
        # The end token was not shown, and earns nothing of its own.
        return plain + [0.0] * answer.has_ended


@final
class WeightedScorer(Scorer):
    """The weighted sum of several, of which each gives one number an answer."""

    def __init__(self, scorers: Mapping[str, tuple[float, Scorer]]) -> None:
        self._scorers = dict(scorers)

    def scores(self, answers: Sequence[Answer]) -> list[float | list[float]]:
        """The sums."""
        totals = [0.0] * len(answers)
        for name, (weight, scorer) in self._scorers.items():
            for place, score in enumerate(scorer.scores(answers)):
                if isinstance(score, list):
                    raise TrainingError(f"reward {name!r} scores tokens", expected="one number for each answer")
                totals[place] += weight * score
        return list(totals)


def exact_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 where the completion is the column `answer`, but for the space around it."""
    return [float(text.strip() == str(wanted).strip()) for text, wanted in zip(completions, answer, strict=True)]


def gsm8k_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 where the last number of the completion is the one after "####" in the column `answer`."""
    wanted = [last_number(str(each).split("####")[-1]) for each in answer]
    if None in wanted:
        raise DataError("an answer holds no number", got=str(answer[wanted.index(None)])[-60:], expected="#### 42")
    return [float(last_number(text) == number) for text, number in zip(completions, wanted, strict=True)]


def lowercase_share(*, completions: list[str]) -> list[float]:
    """A toy that a small model learns from nothing: the share of lower-case letters among the characters."""
    return [sum("a" <= each <= "z" for each in text) / max(len(text), 1) for text in completions]


def last_number(text: str) -> float | None:
    """The last number in a text, None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


VERIFIERS: dict[str, Callable[..., list[float]]] = {
    "exact": exact_match,
    "gsm8k": gsm8k_match,
    "lowercase": lowercase_share,
}


async def _awaited(value: Any) -> Any:
    return await value


def scorer_of(given: Any, tokenizer: Tokenizer) -> Scorer:
    """What a role means: a scalar model, a function, the name of a check, or several by name, each alone or behind the
    weight that it has in the sum: `{"short": (0.1, shortness), "exact": "exact"}`."""
    if isinstance(given, Scorer):
        return given
    if isinstance(given, Mapping):
        parts = {name: _weighed(name, each) for name, each in given.items()}
        return WeightedScorer({name: (weight, scorer_of(each, tokenizer)) for name, (weight, each) in parts.items()})
    if isinstance(given, Run):
        given = given.model
    if isinstance(given, ScalarModel):
        return ModelScorer(given, tokenizer)
    if isinstance(given, str) and given in VERIFIERS:
        return FunctionScorer(VERIFIERS[given], tokenizer)
    if callable(given) and not isinstance(given, torch.nn.Module):
        return FunctionScorer(given, tokenizer)
    raise ConfigError(
        "this gives no rewards",
        got=given if isinstance(given, str) else type(given).__name__,
        expected=f"a run of the task reward, a function, {', '.join(VERIFIERS)}, or several by name",
    )


def _weighed(name: str, given: Any) -> tuple[float, Any]:
    """The weight of one of several, 1 where it has none."""
    if not isinstance(given, tuple):
        return 1.0, given
    is_pair = len(given) == 2 and isinstance(given[0], (int, float)) and math.isfinite(given[0])
    check(is_pair, f"the role reward, {name}", given, "a weight and what gives the reward, as in (0.1, FUNCTION)")
    return float(given[0]), given[1]
