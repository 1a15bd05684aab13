"""What a client may ask for: the bodies of requests as dataclasses, read strictly from JSON. Knows no HTTP.

The fields are OpenAI's, and a few that other servers have too. What is not here is not done, so it is refused.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError
from kitforge.inference.server.refusal import RefusalError

T = TypeVar("T", bound="Wishes")

# The ranges of OpenAI's interface, and of those fields that it does not have.
RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (1, 2**31 - 1),
    "max_completion_tokens": (1, 2**31 - 1),
    "n": (1, 128),
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (1, 2**31 - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logprobs": (0, 5),
    "top_logprobs": (0, 20),
    "seed": (-(2**63), 2**63 - 1),
}
_MAX_STOPS = 16
_LARGEST_BIAS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """What a stream tells besides the text."""

    include_usage: bool = False  # numbers of tokens, in a last piece of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What completions and chats may both ask for. None leaves the server's own value."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | tuple[str, ...] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # taken for the client's own records; it changes nothing

    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop

    def num_alternatives(self) -> int:
        """How many of the most likely tokens are wanted with each."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(Wishes):
    """The body of /v1/completions."""

    prompt: str | tuple[str, ...] | tuple[int, ...] | tuple[tuple[int, ...], ...]
    max_tokens: int | None = None
    logprobs: int | None = None  # log-probabilities of the tokens themselves, and of so many of the most likely ones

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each as text or tokens."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(typing.cast(tuple[str | tuple[int, ...], ...], self.prompt))

    def num_alternatives(self) -> int:
        """How many of the most likely tokens are wanted with each."""
        return self.logprobs or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """A piece of a message."""

    type: Literal["text"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """What one of the speakers said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | tuple[TextPart, ...]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates know messages."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({} if self.name is None else {"name": self.name})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Wishes):
    """The body of /v1/chat/completions."""

    messages: tuple[ChatMessage, ...]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None  # of the tokens themselves
    top_logprobs: int | None = None  # and of so many of the most likely ones

    def num_alternatives(self) -> int:
        """How many of the most likely tokens are wanted with each."""
        return self.top_logprobs or 0


def parse(body: bytes) -> Any:
    """The value that a body of JSON holds. Raises RefusalError."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
        # A half of a pair of surrogates can be spelt in JSON, and is no text.
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeError:
        raise RefusalError(400, "the body is not text in UTF-8", code="invalid_encoding") from None
    except (ValueError, RecursionError) as error:
        words = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        raise RefusalError(400, f"the body is not JSON: {words}", code="invalid_json") from None
    return value


def read(kind: type[T], value: Any) -> T:
    """A request from its JSON. Raises RefusalError naming the field that is unknown, missing or out of range."""
    if not isinstance(value, Mapping):
        raise RefusalError(400, "the body must be an object of JSON", code="invalid_json")
    hints = typing.get_type_hints(kind)
    known = {each.name for each in dataclasses.fields(kind) if each.init}
    given = {name: found for name, found in value.items() if found is not None or name not in known}
    for name, found in given.items():
        _check_number(name, found, hints.get(name))
    try:
        request = from_dict(kind, given)
    except ConfigError as error:
        message = str(error).replace("option ", "parameter ", 1)
        raise RefusalError(400, message, parameter=_named(message), code="invalid_value") from None
    _check_rest(request)
    return request


def _check_number(name: str, value: Any, hint: Any) -> None:
    """Options of a command line may be numbers spelt as text; those of JSON may not."""
    is_number = hint is not None and float in typing.get_args(hint)
    if is_number and not (isinstance(value, (int, float)) and not isinstance(value, bool)):
        raise _wrong(name, value, "a number")
    if name == "logit_bias" and isinstance(value, Mapping):
        for token, bias in value.items():
            is_right = isinstance(bias, (int, float)) and not isinstance(bias, bool) and abs(bias) <= _LARGEST_BIAS
            if not (is_right and token.isascii() and token.isdecimal() and len(token) < 10):
                raise _wrong(name, {token: bias}, f"numbers of tokens, each with -{_LARGEST_BIAS} to {_LARGEST_BIAS}")
    if name in RANGES and isinstance(value, (int, float)):
        low, high = RANGES[name]
        if not low <= value <= high:
            raise _wrong(name, value, f"{low} to {high}")


def _check_rest(request: Wishes) -> None:
    stops = request.stops()
    if not (all(stops) and len(stops) <= _MAX_STOPS):
        raise _wrong("stop", list(stops), f"up to {_MAX_STOPS} strings that are not empty")
    if request.top_p == 0:
        raise _wrong("top_p", 0, "above 0, at most 1")
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise RefusalError(400, "top_logprobs needs logprobs=true", parameter="top_logprobs", code="invalid_value")
    if request.stream_options is not None and not request.stream:
        raise RefusalError(400, "stream_options needs stream=true", parameter="stream_options", code="invalid_value")


def _wrong(name: str, value: Any, expected: str) -> RefusalError:
    got = repr(value)
    shown = got if len(got) <= 80 else f"{got[:80]}..."
    message = f"{name!r} has the wrong value\n  got:      {shown}\n  expected: {expected}"
    return RefusalError(400, message, parameter=name, code="invalid_value")


def _named(message: str) -> str | None:
    """The field that a message about an option is about."""
    parts = message.split("'")
    return parts[1] if len(parts) > 2 else None


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")
