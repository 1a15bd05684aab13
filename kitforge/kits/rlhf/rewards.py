"""What an answer is worth: a trained model, a function of the caller's, or a check against the known answer."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import os
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, final

import numpy as np
import torch

from kitforge.data.chat_datasets import TokenizedExample
from kitforge.data.template import ChatTemplate, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.errors import ConfigError, DataError, KitforgeError, TrainingError, nearest
from kitforge.foundation.untrusted import names_function
from kitforge.kits.rlhf.batching import forward_batches
from kitforge.kits.rlhf.collate import pad_examples
from kitforge.kits.rlhf.reward_model import ValueHeadModel
from kitforge.trainer.run_folder import Run

# What an answer is worth, or each of its tokens.
Score: TypeAlias = float | list[float]
# What TRL calls what a reward function is told, and what it is called here.
_TRL_NAMES = {"prompt_ids": "prompt_tokens", "completion_ids": "completion_tokens"}
# A number as people write it: with a sign, separators of thousands and decimals.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCompletion:
    """One answer to a prompt."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]  # with the end token, where it has one
    is_finished: bool
    is_stopped: bool = False  # a stop string ended it, which it keeps, and no end token
    columns: Mapping[str, Any]  # of the prompt's row
    loss_mask: tuple[bool, ...] = ()  # which tokens the policy wrote itself; (): all

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """Its tokens without the end token."""
        return self.tokens[:-1] if self.is_finished and not self.is_stopped else self.tokens


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutput:
    """What an answer is worth, and what the reward says of it by name."""

    score: Score | None  # None: the reward does not apply
    # Each of several rewards, without its weight, and the numbers that a reward gives beside its score.
    rewards: Mapping[str, float] = field(default_factory=dict)


class Scorer(ABC):
    """Scores answers."""

    def scores(self, answers: Sequence[PromptCompletion]) -> list[Score]:
        """A number for each answer, or one for each of its tokens. Raises TrainingError for an answer without any."""
        return [each.score for each in self.checked_rewards(answers) if each.score is not None]

    def checked_rewards(self, answers: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """The same with what the reward says by name."""
        found = self.rewards(answers)
        num_without = sum(each.score is None for each in found)
        if num_without:
            raise TrainingError(
                "no reward applies to some completions",
                got=f"None for {num_without} of {len(answers)}",
                expected="a number from at least one reward for each completion",
                fix="return a number where no other reward does, or add a reward that applies to every row",
            )
        return found

    @abstractmethod
    def rewards(self, answers: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """The same; a score of None for an answer that the reward does not apply to."""


@final
class ModelScorer(Scorer):
    """A reward model, which reads prompt and answer as the policy's tokens, or as text where it has a tokenizer of its
    own: the messages of the column `prompt` and the answer through its chat template, and plain text as it is."""

    def __init__(
        self, model: ValueHeadModel, tokenizer: Tokenizer, own: Tokenizer | None = None, most_tokens: int | None = None
    ) -> None:
        """`most_tokens`: of one forward pass, see `at_once`."""
        self.model = model
        self._most_tokens = most_tokens
        self._tokenizer = tokenizer
        is_other = own is not None and own.fingerprint != tokenizer.fingerprint
        self._own = own if is_other else None
        self._template: ChatTemplate | None = template_of(own) if own is not None and is_other else None

    @torch.no_grad()
    def rewards(self, answers: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """Normalised scores after each answer's last token."""
        found = [RewardOutput(score=0.0)] * len(answers)
        device = self.model.score.weight.device
        whole = [self._tokens(each) for each in answers]
        pad_id = (self._own or self._tokenizer).pad_id
        for indices in forward_batches([len(each) for each in whole], self._most_tokens, device):
            texts = [TokenizedExample(tokens=whole[index], loss_mask=(False,) * len(whole[index])) for index in indices]
            batch = pad_examples(texts, pad_id)
            scores = self.model.scores_at(batch["tokens"].to(device), batch["ends"].to(device))
            for index, score in zip(indices, self.model.normalized(scores).tolist(), strict=True):
                found[index] = RewardOutput(score=score)
        return found

    def _tokens(self, answer: PromptCompletion) -> tuple[int, ...]:
        """What the model reads. Of an answer that was cut off it reads no end token, but for one that its chat template
        writes after every reply."""
        if self._own is None or self._template is None:
            return (*answer.prompt, *answer.tokens)
        text, said = self._tokenizer.decode(answer.text_tokens), answer.columns.get("prompt")
        if isinstance(said, (list, tuple)) and said and all(isinstance(each, Mapping) for each in said):
            return self._template.training([*said, {"role": "assistant", "content": text}]).tokens
        prompt = said if isinstance(said, str) else self._tokenizer.decode(answer.prompt)
        end = [self._own.eos_id] if answer.is_finished else []
        return (*self._own.encode_prompt(prompt), *self._own.encode(text), *end)


@final
class FunctionScorer(Scorer):
    """A function `f(*, prompts, completions, prompt_tokens, completion_tokens, **columns)`, plain or async.

    Texts and tokens are without the end token, and each column is a list as long as they are. It names the arguments
    that it wants. It returns a number for each answer, a list with one for each token, or a mapping with "score", whose
    other numbers are logged by their names.
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

    def rewards(self, answers: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """What the function says. Raises TrainingError for what it raises, and for answers that are no scores."""
        arguments = self._arguments(answers)
        try:
            found = self._function(**arguments)
            if inspect.isawaitable(found):
                found = _run_awaitable(found)
        except KitforgeError:
            raise
        except Exception as error:
            raise TrainingError(f"the reward function {self._name!r} failed", got=repr(error)) from error
        found = _to_python(found)
        values = [found] if isinstance(found, (int, float)) and len(answers) == 1 else found
        if not isinstance(values, list) or len(values) != len(answers):
            raise TrainingError(
                f"the reward function {self._name!r} gave the wrong number of scores",
                got=len(values) if isinstance(values, list) else f"{type(found).__name__} {str(found)[:60]}",
                expected=f"a list of {len(answers)}, one for each completion",
            )
        return [
            RewardOutput(score=self._score(value, answer), rewards=self._figures(value))
            for value, answer in zip(values, answers, strict=True)
        ]

    def _arguments(self, answers: Sequence[PromptCompletion]) -> dict[str, Any]:
        known: dict[str, Any] = {
            "prompts": [self._tokenizer.decode(each.prompt) for each in answers],
            "completions": [self._tokenizer.decode(each.text_tokens) for each in answers],
            "prompt_tokens": [list(each.prompt) for each in answers],
            "completion_tokens": [list(each.text_tokens) for each in answers],
        }
        columns = dict.fromkeys(name for each in answers for name in each.columns)
        known = {name: [each.columns.get(name) for each in answers] for name in columns} | known
        if missing := [name for name in self._needed if name not in known]:
            raise DataError(
                f"the reward function {self._name!r} reads a column that the prompts do not have",
                got=f"columns {', '.join(columns)}",
                expected=", ".join(missing),
                fix=f"name the argument {_TRL_NAMES[missing[0]]}"
                if missing[0] in _TRL_NAMES
                else f"data.columns.{missing[0]}=NAME; {nearest(missing[0], columns)}",
            )
        return {name: value for name, value in known.items() if self._wants_all or name in self._wanted}

    def _figures(self, value: Any) -> dict[str, float]:
        """What a mapping holds beside its score."""
        given = value if isinstance(value, Mapping) else {}
        found = {str(name): _to_python(each) for name, each in given.items() if name != "score" and each is not None}
        for name, each in found.items():
            if "score" in given and not (isinstance(each, (int, float)) and math.isfinite(each)):
                raise TrainingError(
                    f"the reward function {self._name!r} gave something beside its score that cannot be logged",
                    got=f"{name}: {each!r}",
                    expected="a finite number, or None where it does not apply",
                    fix="leave it out of the mapping",
                )
        return {name: float(each) for name, each in found.items()} if "score" in given else {}

    def _score(self, value: Any, answer: PromptCompletion) -> Score | None:
        if isinstance(value, Mapping):
            value = _to_python(value.get("score", value))
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers):
            raise TrainingError(
                f"the reward function {self._name!r} gave something that is no score",
                got=repr(value),
                expected="a finite number, a list of them, a mapping with 'score', or None where it does not apply",
            )
        if not isinstance(value, list):
            return float(value)
        wanted = len(answer.text_tokens)
        if len(numbers) != wanted:
            raise TrainingError(
                f"the reward function {self._name!r} gave the wrong number of scores for a completion",
                got=len(numbers),
                expected=f"{wanted}, one for each token",
            )
        # The end token was not shown, and earns nothing of its own.
        return [float(each) for each in numbers] + [0.0] * (len(answer.tokens) - wanted)


@final
class WeightedScorer(Scorer):
    """The weighted sum of several, of which each gives one number an answer, or None, which adds nothing."""

    def __init__(self, scorers: Mapping[str, tuple[float, Scorer]]) -> None:
        self._scorers = dict(scorers)

    def rewards(self, answers: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """The sums; None where none of them applies. What a reward gives beside its score is named behind its name."""
        sums: list[float | None] = [None] * len(answers)
        rewards: list[dict[str, float]] = [{} for _ in answers]
        for name, (weight, scorer) in self._scorers.items():
            for index, each in enumerate(scorer.rewards(answers)):
                if isinstance(each.score, list):
                    raise TrainingError(f"reward {name!r} scores tokens", expected="one number for each answer")
                if each.score is not None:
                    sums[index] = (sums[index] or 0.0) + weight * each.score
                    rewards[index][name] = each.score
                rewards[index] |= {f"{name}/{own}": value for own, value in each.rewards.items()}
        return [RewardOutput(score=total, rewards=own) for total, own in zip(sums, rewards, strict=True)]


def exact_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 where the completion is the column `answer`, but for the space around it."""
    return [float(text.strip() == str(wanted).strip()) for text, wanted in zip(completions, answer, strict=True)]


def gsm8k_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 where the last number of the completion is the one after "####" in the column `answer`."""
    wanted = [last_number(str(each).split("####")[-1]) for each in answer]
    if None in wanted:
        raise DataError("an answer holds no number", got=str(answer[wanted.index(None)])[-60:], expected="#### 42")
    return [float(last_number(text) == number) for text, number in zip(completions, wanted, strict=True)]


def lowercase_fraction(*, completions: list[str]) -> list[float]:
    """A toy that a small model learns from nothing: the share of lower-case letters among the characters."""
    return [sum("a" <= each <= "z" for each in text) / max(len(text), 1) for text in completions]


def last_number(text: str) -> float | None:
    """The last number in a text, None where there is none."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


VERIFIERS: dict[str, Callable[..., list[float]]] = {
    "exact": exact_match,
    "gsm8k": gsm8k_match,
    "lowercase": lowercase_fraction,
}


async def _await(value: Awaitable[Any]) -> Any:
    return await value


def _run_awaitable(value: Awaitable[Any]) -> Any:
    """What comes of a coroutine, also where a loop runs already, as it does in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_await(value))
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _await(value)).result()


def _to_python(value: Any) -> Any:
    """Tensors, arrays and whatever else can be gone through as lists, numbers of numpy's as Python's."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    is_several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return [_to_python(each) for each in value] if is_several else value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A scalar model and the tokenizer that it was trained with; None: the policy's."""

    model: ValueHeadModel
    tokenizer: Tokenizer | None


def networks_in(given: Any) -> list[torch.nn.Module]:
    """The networks in what a role was given: in a run, a reward model, several of them, or alone."""
    if isinstance(given, (Run, RewardModel)):
        return [given.model]
    if isinstance(given, torch.nn.Module):
        return [given]
    members = list(given.values()) if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else []
    return [network for each in members for network in networks_in(each)]


def find_function(path: str) -> Callable[..., Any]:
    """The function `package.module:function`, of an installed package or of the current folder. Raises ConfigError."""
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no reward function {path!r}",
            got=f"{type(error).__name__}: {error}",
            expected="reward=package.module:function, installed or in the current folder",
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ConfigError(f"{path!r} is no function", got=type(found).__name__)
    function: Callable[..., Any] = found
    return function


def reward_tokenizer(model: Any) -> Tokenizer | None:
    """The tokenizer that a reward model came with; None: it reads the policy's tokens."""
    if isinstance(model, Run):
        return cast(Tokenizer, model.processor)
    return model.tokenizer if isinstance(model, RewardModel) else None


def critic_init(judge: Any, tokenizer: Tokenizer) -> ValueHeadModel | None:
    """The reward model that initialises the critic; None if there is none, or it reads other tokens than the policy."""
    own = reward_tokenizer(judge)
    model = judge.model if isinstance(judge, (Run, RewardModel)) else judge
    reads_same = own is None or own.fingerprint == tokenizer.fingerprint
    return model if isinstance(model, ValueHeadModel) and reads_same else None


def scorer_of(given: Any, tokenizer: Tokenizer, most_tokens: int | None = None) -> Scorer:
    """What a role means: a scalar model, a function, the name of a check, a function's `package.module:function`, or
    several, in a list or by name, each alone or behind the weight that it has in the sum:
    `{"short": (0.1, shortness), "exact": "exact"}`. `most_tokens`: of one forward pass of a model."""
    if isinstance(given, Scorer):
        return given
    if several := reward_members(given):
        parts = {name: weighted_member(name, each) for name, each in several.items()}
        found = {name: (weight, scorer_of(each, tokenizer, most_tokens)) for name, (weight, each) in parts.items()}
        return WeightedScorer(found)
    own = reward_tokenizer(given)
    given = given.model if isinstance(given, (Run, RewardModel)) else given
    if isinstance(given, ValueHeadModel):
        return ModelScorer(given, tokenizer, own, most_tokens)
    if isinstance(given, str) and given in VERIFIERS:
        return FunctionScorer(VERIFIERS[given], tokenizer)
    if isinstance(given, str) and names_function(given):
        return FunctionScorer(find_function(given), tokenizer)
    if callable(given) and not isinstance(given, torch.nn.Module):
        return FunctionScorer(given, tokenizer)
    names = f"{', '.join(VERIFIERS)}, package.module:function"
    missing = ", and there is no such folder" if isinstance(given, str) and "/" in given else ""
    raise ConfigError(
        "this gives no rewards",
        got=f"{given}{missing}" if isinstance(given, str) else type(given).__name__,
        expected=f"a run of the task reward, a function, {names}, or several in a list or by name",
    )


def reward_members(given: Any) -> dict[str, Any]:
    """Rewards that are added up, by name; empty for a single one."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, list):
        return {}
    found: dict[str, Any] = {}
    for number, each in enumerate(given):
        one = each[-1] if isinstance(each, (tuple, list)) and each else each
        own = one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)
        name = own.rpartition(":")[2]
        found[name if name not in found else f"{name}_{number}"] = each
    return found


def reward_reference(given: Any) -> Any:
    """What names it on a command line or in config.yaml: the folder of a run, `package.module:function`; None for what
    has no name there."""
    if several := reward_members(given):
        parts = {name: weighted_member(name, each) for name, each in several.items()}
        named = {name: [weight, reward_reference(each)] for name, (weight, each) in parts.items()}
        return None if any(each is None for _, each in named.values()) else named
    if isinstance(given, (str, os.PathLike, Run)):
        return str(given.folder if isinstance(given, Run) else given)
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", None)
    found = sys.modules.get(str(module)) if module != "__main__" else None
    return f"{module}:{name}" if name is not None and getattr(found, name, None) is given else None


def weighted_member(name: str, given: Any) -> tuple[float, Any]:
    """The weight of one of several, 1 where it has none."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (int, float))
    if not is_pair and not isinstance(given, tuple):
        return 1.0, given
    is_sound = is_pair and math.isfinite(given[0])
    check(is_sound, f"the role reward, {name}", given, "a weight and what gives the reward, as in (0.1, FUNCTION)")
    return float(given[0]), given[1]
