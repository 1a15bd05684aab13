"""Rewards: reward models, reward functions, verifiers, and weighted sums of them."""

import importlib.util
import inspect
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from kitforge.data.chat.datasets import TokenizedExample, with_contents
from kitforge.data.chat.rows import is_chat, with_open_end
from kitforge.data.chat.template import ChatTemplate, Message, template_of
from kitforge.data.text.continuation import encode_completion
from kitforge.data.tokenizers.loading import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.device import copy_to
from kitforge.foundation.errors import ConfigError, DataError, DependencyError, KitforgeError, TrainingError, nearest
from kitforge.foundation.files import user_path
from kitforge.foundation.untrusted import names_function
from kitforge.kits.rlhf.batching import forward_batches, pad_examples
from kitforge.kits.rlhf.config import PythonTestsOptions
from kitforge.kits.rlhf.event_loop import EventLoop
from kitforge.kits.rlhf.roles.code_reward import python_tests, runner_of
from kitforge.kits.rlhf.roles.math_reward import math_match
from kitforge.kits.rlhf.roles.numbers import last_number
from kitforge.kits.rlhf.roles.prompt_completion import PromptCompletion
from kitforge.kits.rlhf.roles.value_head import ValueHeadModel
from kitforge.trainer.run_folder import Run

# The reward of a completion, or of each of its tokens.
Score: TypeAlias = float | list[float]
# TRL's argument names of a reward function, and ours.
_TRL_NAMES = {"prompt_ids": "prompt_tokens", "completion_ids": "completion_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutput:
    """The reward of a completion, and named values to log."""

    score: Score | None  # None: the reward does not apply to this row
    # Each member of a weighted sum, unweighted, and further numbers of a reward function.
    rewards: Mapping[str, float] = field(default_factory=dict)


class Scorer(ABC):
    """Computes rewards of completions."""

    def checked_rewards(self, completions: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """`rewards`, checked. Raises TrainingError for a completion without a reward."""
        found = self.rewards(completions)
        num_without = sum(each.score is None for each in found)
        if num_without:
            raise TrainingError(
                "no reward applies to some completions",
                got=f"None for {num_without} of {len(completions)}",
                expected="a number from at least one reward for each completion",
                fix="return a number where no other reward does, or add a reward that applies to every row",
            )
        return found

    @abstractmethod
    def rewards(self, completions: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """The reward of each completion; None where the reward does not apply."""


class ModelScorer(Scorer):
    """A reward model. With its own tokenizer it reads text: the dialogue that the policy saw and the completion through
    its own chat template, other prompts as plain text. Otherwise it reads the policy's tokens."""

    def __init__(
        self, model: ValueHeadModel, tokenizer: Tokenizer, own: Tokenizer | None = None, most_tokens: int | None = None
    ) -> None:
        """`most_tokens` per forward pass, see `forward_batches`."""
        self.model = model
        self._most_tokens = most_tokens
        self._tokenizer = tokenizer
        self._own = None if own is None or own.fingerprint == tokenizer.fingerprint else own
        self._template: ChatTemplate | None = None if self._own is None else template_of(self._own)

    @torch.no_grad()
    def rewards(self, completions: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """Normalized scores at the last token of each completion."""
        found = [RewardOutput(score=0.0)] * len(completions)
        device = self.model.score.weight.device
        whole = [self._tokens(each) for each in completions]
        pad_id = (self._own or self._tokenizer).pad_id
        for indices in forward_batches([len(each) for each in whole], self._most_tokens, device):
            texts = [TokenizedExample(tokens=whole[index], loss_mask=(False,) * len(whole[index])) for index in indices]
            batch = pad_examples(texts, pad_id)
            scores = self.model.scores_at(copy_to(batch["tokens"], device), copy_to(batch["ends"], device))
            for index, score in zip(indices, self.model.normalized(scores).tolist(), strict=True):
                found[index] = RewardOutput(score=score)
        return found

    def _tokens(self, completion: PromptCompletion) -> tuple[int, ...]:
        """The input tokens. A truncated completion has no EOS token, unless the chat template always writes one."""
        if self._own is None or self._template is None:
            return (*completion.prompt, *completion.tokens)
        said = completion.columns.get("prompt")
        if completion.prompt_messages is None and isinstance(said, (list, tuple)) and is_chat(said):
            completion = replace(completion, prompt_messages=tuple(cast(Sequence[Message], with_open_end(said))))
        if completion.prompt_messages is not None:
            # The reply goes on with a message that the prompt has begun, as in the rows of the reward model.
            write = partial(self._template.training, prompt=completion.prompt_messages, **completion.prompt_inputs)
            return with_contents(write, completion.messages(self._tokenizer)).tokens
        text = completion.text(self._tokenizer)
        prompt = said if isinstance(said, str) else self._tokenizer.decode(completion.prompt)
        end = [self._own.eos_id] if completion.is_finished else []
        return (*chain.from_iterable(encode_completion(self._own, prompt, text)), *end)


# The arguments of a reward function that are no columns.
_ARGUMENTS: dict[str, Callable[[PromptCompletion, Tokenizer], Any]] = {
    "prompts": lambda each, tokenizer: tokenizer.decode(each.prompt),
    "completions": lambda each, tokenizer: each.turns(tokenizer)[-1],
    "prompt_tokens": lambda each, _: list(each.prompt),
    "completion_tokens": lambda each, _: list(each.text_tokens),
    "turns": lambda each, tokenizer: each.turns(tokenizer),
    "messages": lambda each, tokenizer: each.messages(tokenizer),
    "prompt_messages": lambda each, tokenizer: each.question(tokenizer),
    "completion_messages": lambda each, tokenizer: each.completion_messages(tokenizer),
}
# Of these, which take a chat template to make, a function gets only those that it names.
_ON_REQUEST = ("prompt_messages", "completion_messages")


class FunctionScorer(Scorer):
    """A function `f(*, prompts, completions, prompt_tokens, completion_tokens, turns, messages, prompt_messages,
    completion_messages, **columns)`, plain or async.

    It gets what it names: the last reply (`completions`), each turn of the policy, the whole conversation or its two
    parts, all tokens after the prompt; without the EOS token. It returns per completion a number, a list of one number
    per token, or a mapping with "score" whose other numbers are logged by name.
    """

    def __init__(self, function: Callable[..., Any], tokenizer: Tokenizer, loop: EventLoop) -> None:
        """An async function runs in `loop`."""
        self._function = function
        self._loop = loop
        self._tokenizer = tokenizer
        self._name = getattr(function, "__name__", type(function).__name__)
        parameters = inspect.signature(function).parameters.values()
        self._wants_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        self._wanted = {each.name for each in parameters}
        # The arguments that a partial binds, by name or by position.
        self._bound: set[str] = set()
        if isinstance(function, partial):
            self._bound = {*function.keywords, *list(inspect.signature(function.func).parameters)[: len(function.args)]}
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self._needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variable]

    def rewards(self, completions: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """Call the function. Raises TrainingError if it raises or returns no valid rewards."""
        arguments = self._arguments(completions)
        try:
            found = self._function(**arguments)
            if inspect.isawaitable(found):
                found = self._loop.run(found)
        except KitforgeError:
            raise
        except Exception as error:
            raise TrainingError(f"the reward function {self._name!r} failed", got=repr(error)) from error
        found = _to_python(found)
        values = [found] if isinstance(found, (int, float)) and len(completions) == 1 else found
        if not isinstance(values, list) or len(values) != len(completions):
            raise TrainingError(
                f"the reward function {self._name!r} returned the wrong number of rewards",
                got=len(values) if isinstance(values, list) else f"{type(found).__name__} {str(found)[:60]}",
                expected=f"a list of {len(completions)}, one for each completion",
            )
        return [
            RewardOutput(score=self._score(value, completion), rewards=self._figures(value))
            for value, completion in zip(values, completions, strict=True)
        ]

    def _arguments(self, completions: Sequence[PromptCompletion]) -> dict[str, Any]:
        columns = dict.fromkeys(name for each in completions for name in each.columns)
        known = [*_ARGUMENTS, *(name for name in columns if name not in _ARGUMENTS)]
        if missing := [name for name in self._needed if name not in known]:
            raise DataError(
                f"the reward function {self._name!r} needs a column that the dataset does not have",
                got=f"columns {', '.join(columns)}",
                expected=", ".join(missing),
                fix=f"name the argument {_TRL_NAMES[missing[0]]}"
                if missing[0] in _TRL_NAMES
                else f"data.columns.{missing[0]}=NAME; {nearest(missing[0], columns)}",
            )
        every = {name for name in known if self._wants_all and name not in _ON_REQUEST}
        given = [name for name in known if name in (every | self._wanted) - self._bound]
        return {name: [self._argument(name, each) for each in completions] for name in given}

    def _argument(self, name: str, completion: PromptCompletion) -> Any:
        of = _ARGUMENTS.get(name)
        return completion.columns.get(name) if of is None else of(completion, self._tokenizer)

    def _figures(self, value: Any) -> dict[str, float]:
        """The named values of a mapping."""
        given = value if isinstance(value, Mapping) else {}
        found = {str(name): _to_python(each) for name, each in given.items() if name != "score" and each is not None}
        for name, each in found.items():
            if "score" in given and not (isinstance(each, (int, float)) and math.isfinite(each)):
                raise TrainingError(
                    f"the reward function {self._name!r} returned a value that cannot be logged",
                    got=f"{name}: {each!r}",
                    expected="a finite number, or None where it does not apply",
                    fix="leave it out of the mapping",
                )
        return {name: float(each) for name, each in found.items()} if "score" in given else {}

    def _score(self, value: Any, completion: PromptCompletion) -> Score | None:
        if isinstance(value, Mapping):
            value = _to_python(value.get("score", value))
        if value is None:
            return None
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(each, (int, float)) and math.isfinite(each) for each in numbers):
            raise TrainingError(
                f"the reward function {self._name!r} returned an invalid reward",
                got=repr(value),
                expected="a finite number, a list of them, a mapping with 'score', or None where it does not apply",
            )
        if not isinstance(value, list):
            return float(value)
        wanted = len(completion.text_tokens)
        if len(numbers) != wanted:
            raise TrainingError(
                f"the reward function {self._name!r} returned the wrong number of token rewards",
                got=len(numbers),
                expected=f"{wanted}, one for each token",
            )
        # The EOS token was not passed to the function; its reward is 0.
        return [float(each) for each in numbers] + [0.0] * (len(completion.tokens) - wanted)


class WeightedScorer(Scorer):
    """A weighted sum of rewards. Each is a number per completion; a None adds 0."""

    def __init__(self, scorers: Mapping[str, tuple[float, Scorer]]) -> None:
        self._scorers = dict(scorers)

    def rewards(self, completions: Sequence[PromptCompletion]) -> list[RewardOutput]:
        """The weighted sums; None where no reward applies. Further values are named REWARD/NAME."""
        terms: list[list[float]] = [[] for _ in completions]
        rewards: list[dict[str, float]] = [{} for _ in completions]
        for name, (weight, scorer) in self._scorers.items():
            for index, each in enumerate(scorer.rewards(completions)):
                if isinstance(each.score, list):
                    raise TrainingError(f"reward {name!r} returns token rewards", expected="one number per completion")
                if each.score is not None:
                    terms[index].append(weight * each.score)
                    rewards[index][name] = each.score
                rewards[index] |= {f"{name}/{own}": value for own, value in each.rewards.items()}
        return [RewardOutput(score=_sum(own), rewards=named) for own, named in zip(terms, rewards, strict=True)]


def _sum(terms: Sequence[float]) -> float | None:
    """The sum; None without terms, and 0 where they cancel but for their rounding, which is not a signal."""
    if not terms:
        return None
    total = math.fsum(terms)
    return total if abs(total) > 1e-14 * sum(map(abs, terms)) else 0.0


def right_answers(value: Any) -> list[str]:
    """What is right by a cell of the column `answer`: a text or a number, any of a list, or what a mapping of verl
    calls `ground_truth` (and `target` in it). Raises DataError for another mapping and an empty list."""
    value = _to_python(value)
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("ground_truth", "target") if name in value), [])
        return right_answers(value)
    found = [text for each in value for text in right_answers(each)] if isinstance(value, list) else [str(value)]
    if not found:
        expected = "a text, a number, a list of these, or a mapping with 'ground_truth'"
        raise DataError("column 'answer' says nowhere what is right", got=value, expected=expected)
    return found


def exact_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 if the completion equals the column `answer`, surrounding whitespace ignored; see `right_answers`."""
    wanted = [{text.strip() for text in right_answers(each)} for each in answer]
    return [float(text.strip() in texts) for text, texts in zip(completions, wanted, strict=True)]


def gsm8k_match(*, completions: list[str], answer: list[Any]) -> list[float]:
    """1 if the last number of the completion equals the one after "####" in the column `answer`; see `last_number` and
    `right_answers`."""
    wanted = [{last_number(text.split("####")[-1]) for text in right_answers(each)} - {None} for each in answer]
    if set() in wanted:
        raise DataError("no number in column 'answer'", got=str(answer[wanted.index(set())])[-60:], expected="#### 42")
    return [float(last_number(text) in numbers) for text, numbers in zip(completions, wanted, strict=True)]


def math_reward(*, completions: list[str], answer: list[Any]) -> list[dict[str, float]]:
    """See `math_match`; right is what the column `answer` says, see `right_answers`."""
    return math_match(completions=completions, answers=[right_answers(each) for each in answer])


def lowercase_fraction(*, completions: list[str]) -> list[float]:
    """Toy reward: the fraction of lower-case letters."""
    return [sum("a" <= each <= "z" for each in text) / max(len(text), 1) for text in completions]


VERIFIERS: dict[str, Callable[..., Any]] = {
    "exact": exact_match,
    "gsm8k": gsm8k_match,
    "lowercase": lowercase_fraction,
    "math": math_reward,
    "python_tests": python_tests,
}


def _to_python(value: Any) -> Any:
    """Tensors, arrays and iterables as lists, NumPy scalars as Python numbers. A set has no order: it stays one."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return value.tolist()
    is_several = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, set, frozenset))
    return [_to_python(each) for each in value] if is_several else value


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """A reward model and its tokenizer; None: the policy's."""

    model: ValueHeadModel
    tokenizer: Tokenizer | None


def networks_in(given: Any) -> list[torch.nn.Module]:
    """All models in the value of a role: a run, a reward model, a module, or several."""
    if isinstance(given, (Run, RewardModel)):
        return [given.model]
    if isinstance(given, torch.nn.Module):
        return [given]
    members = list(given.values()) if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else []
    return [network for each in members for network in networks_in(each)]


def find_function(path: str) -> Callable[..., Any]:
    """The function `package.module:function` or `file.py:function`, of an installed package or of the current folder.
    Raises ConfigError."""
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name.removesuffix(".py"))
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"there is no function or class {path!r}",
            got=f"{type(error).__name__}: {error}",
            expected="package.module:function, installed or in the current folder",
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ConfigError(f"{path!r} is not a function", got=type(found).__name__)
    function: Callable[..., Any] = found
    return function


def reward_tokenizer(model: Any) -> Tokenizer | None:
    """The tokenizer that a reward model came with; None: it reads the policy's tokens."""
    if isinstance(model, Run):
        return cast(Tokenizer, model.processor)
    return model.tokenizer if isinstance(model, RewardModel) else None


def critic_init(judge: Any, tokenizer: Tokenizer) -> ValueHeadModel | None:
    """The reward model that initializes the critic; None if there is none, or it reads other tokens than the policy."""
    own = reward_tokenizer(judge)
    model = judge.model if isinstance(judge, (Run, RewardModel)) else judge
    reads_same = own is None or own.fingerprint == tokenizer.fingerprint
    return model if isinstance(model, ValueHeadModel) and reads_same else None


def scorer_of(
    given: Any,
    tokenizer: Tokenizer,
    most_tokens: int | None = None,
    loop: EventLoop | None = None,
    tests: PythonTestsOptions | None = None,
) -> Scorer:
    """The scorer of the role `reward`: a reward model, a function, the name of a verifier, `package.module:function`,
    or several in a list or mapping, each with an optional weight: `{"short": (0.1, shortness), "exact": "exact"}`.
    `most_tokens` per forward pass of a model; async functions run in `loop`; `tests` are the options of
    `python_tests`."""
    if isinstance(given, Scorer):
        return given
    loop = EventLoop() if loop is None else loop
    if several := reward_members(given):
        parts = {name: weighted_member(name, each) for name, each in several.items()}
        build = partial(scorer_of, tokenizer=tokenizer, most_tokens=most_tokens, loop=loop, tests=tests)
        return WeightedScorer({name: (weight, build(each)) for name, (weight, each) in parts.items()})
    own = reward_tokenizer(given)
    given = given.model if isinstance(given, (Run, RewardModel)) else given
    if isinstance(given, ValueHeadModel):
        return ModelScorer(given, tokenizer, own, most_tokens)
    if given == "math" and importlib.util.find_spec("math_verify") is None:
        raise DependencyError("math-verify", needed_for="reward=math", extra="math")
    if given == "python_tests":
        return FunctionScorer(partial(python_tests, runner=runner_of(tests or PythonTestsOptions())), tokenizer, loop)
    if isinstance(given, str) and given in VERIFIERS:
        return FunctionScorer(VERIFIERS[given], tokenizer, loop)
    if isinstance(given, str) and names_function(given):
        return FunctionScorer(find_function(given), tokenizer, loop)
    if callable(given) and not isinstance(given, torch.nn.Module):
        return FunctionScorer(given, tokenizer, loop)
    names = f"{', '.join(VERIFIERS)}, package.module:function"
    missing = ", and there is no such folder" if isinstance(given, str) and "/" in given else ""
    raise ConfigError(
        "invalid reward",
        got=f"{given}{missing}" if isinstance(given, str) else type(given).__name__,
        expected=f"a run of the task reward, a function, {names}, or several in a list or by name",
    )


def reward_members(given: Any) -> dict[str, Any]:
    """The members of a sum of rewards by name; empty for a single reward."""
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, list):
        return {}
    names, found = list[str](), dict[str, Any]()
    for each in given:
        one = each[-1] if isinstance(each, (tuple, list)) and each else each
        own: str = one if isinstance(one, str) else getattr(one, "__name__", type(one).__name__)
        names.append(own.rpartition(":")[2])
    for index, (name, each) in enumerate(zip(names, given, strict=True)):
        numbered = (f"{name}_{number}" for number in count(index))
        # A made-up name is nobody's own.
        found[name if name not in found else next(one for one in numbered if one not in {*names, *found})] = each
    return found


def has_reward(given: Any, name: str) -> bool:
    """Whether a reward of this name is among the rewards."""
    several = reward_members(given)
    return any(has_reward(weighted_member(key, each)[1], name) for key, each in several.items()) or given == name


def reward_folders(given: Any) -> list[Path]:
    """The folders among the rewards."""
    if several := reward_members(given):
        members = (weighted_member(name, each)[1] for name, each in several.items())
        return [folder for each in members for folder in reward_folders(each)]
    folder = user_path(given) if isinstance(given, (str, Path)) else None
    return [folder] if folder is not None and folder.is_dir() else []


def reward_reference(given: Any) -> Any:
    """The reward as config.yaml records it: a run folder or `package.module:function`; None without a name."""
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
    """Weight and reward of a member; the default weight is 1."""
    is_pair = isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[0], (int, float))
    if not is_pair and not isinstance(given, tuple):
        return 1.0, given
    is_sound = is_pair and math.isfinite(given[0])
    check(is_sound, f"the role reward, {name}", given, "a weight and what gives the reward, as in (0.1, FUNCTION)")
    return float(given[0]), given[1]
