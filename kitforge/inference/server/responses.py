"""Pieces of text in the shapes of OpenAI's interface, whole or as events of a stream. Knows no HTTP."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from kitforge.data.tokenizer import Tokenizer
from kitforge.inference.server.exchange import Exchange
from kitforge.inference.server.refusal import RefusalError
from kitforge.inference.text import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, kw_only=True)
class Choice:
    """One answer as far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)  # each on its own; only where log-probabilities are asked for
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[tuple[str, float]]] = field(default_factory=list)  # the most likely tokens, if asked for

    def add(self, other: Choice) -> None:
        """Go on with what came next."""
        self.text += other.text
        self.finish_reason = other.finish_reason
        self.tokens += other.tokens
        self.logprobs += other.logprobs
        self.alternatives += other.alternatives


class Shape(ABC):
    """How answers are written. `has_logprobs` says whether the tokens are told apart."""

    def __init__(self, model: str, tokenizer: Tokenizer, *, has_logprobs: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._has_logprobs = has_logprobs
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @property
    @abstractmethod
    def prefix(self) -> str:
        """How the names of answers begin."""

    @abstractmethod
    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice that has ended."""

    @abstractmethod
    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""

    @abstractmethod
    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""

    def read(self, piece: Piece) -> Choice:
        """A piece of the engine as part of a choice."""
        choice = Choice(text=piece.text, finish_reason=piece.finish_reason)
        if self._has_logprobs:
            ends = bool(piece.tokens) and piece.tokens[-1] in self._tokenizer.eos_ids
            kept = piece.tokens[:-1] if ends else piece.tokens
            choice.tokens = [self._tokenizer.decode([token]) for token in kept]
            choice.logprobs = piece.logprobs[: len(kept)]
            choice.alternatives = [
                [(self._tokenizer.decode([token]), logprob) for token, logprob in others]
                for others in piece.alternatives[: len(kept)]
            ]
        return choice

    def answer(self, choices: list[Choice], usage: Mapping[str, int]) -> dict[str, Any]:
        """The whole body."""
        written = [{"index": place, **self.whole(choice)} for place, choice in enumerate(choices)]
        return {**self._head(is_stream=False), "choices": written, "usage": dict(usage)}

    def event(self, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> bytes:
        """One event of a stream."""
        body = {**self._head(is_stream=True), "choices": choices}
        return written({**body, "usage": usage} if usage is not None else body)

    def _head(self, *, is_stream: bool) -> dict[str, Any]:
        kind = self.kind(is_stream=is_stream)
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


@final
class CompletionShape(Shape):
    """Of /v1/completions."""

    @property
    def prefix(self) -> str:
        """How the names of answers begin."""
        return "cmpl"

    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""
        return "text_completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice that has ended."""
        logprobs = None
        if self._has_logprobs:
            offsets = [sum(map(len, choice.tokens[:place])) for place in range(len(choice.tokens))]
            logprobs = {
                "tokens": choice.tokens,
                "token_logprobs": choice.logprobs,
                "top_logprobs": _by_text(choice) if any(choice.alternatives) else None,
                "text_offset": offsets,
            }
        return {"text": choice.text, "finish_reason": choice.finish_reason, "logprobs": logprobs}

    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""
        return self.whole(choice)


@final
class ChatShape(Shape):
    """Of /v1/chat/completions."""

    @property
    def prefix(self) -> str:
        """How the names of answers begin."""
        return "chatcmpl"

    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""
        return "chat.completion.chunk" if is_stream else "chat.completion"

    def whole(self, choice: Choice) -> dict[str, Any]:
        """A choice that has ended."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""
        delta = ({"role": "assistant"} if is_first else {}) | {"content": choice.text}
        return {"delta": delta, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        told = zip(choice.tokens, choice.logprobs, choice.alternatives, strict=True)
        content = [
            {**_likely(token, logprob), "top_logprobs": [_likely(*other) for other in others]}
            for token, logprob, others in told
        ]
        return {"content": content, "refusal": None}


def _by_text(choice: Choice) -> list[dict[str, float]]:
    """For each token the most likely ones and itself; of several with the same text the most likely."""
    found: list[dict[str, float]] = []
    for token, logprob, others in zip(choice.tokens, choice.logprobs, choice.alternatives, strict=True):
        found.append({})
        for text, value in [*others, (token, logprob)]:
            found[-1].setdefault(text, value)
    return found


def _likely(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


async def collected(shape: Shape, exchange: Exchange) -> dict[str, Any]:
    """The whole answer, once it is there."""
    choices = [Choice() for _ in range(exchange.num_choices)]
    async for place, piece in exchange.pieces():
        choices[place].add(shape.read(piece))
    return shape.answer(choices, exchange.usage())


async def events(shape: Shape, exchange: Exchange, *, has_usage: bool) -> AsyncIterator[bytes]:
    """The answer as server-sent events, each piece as it comes."""
    begun: set[int] = set()
    held: dict[int, Choice] = {}
    try:
        async for place, piece in exchange.pieces():
            choice = held.setdefault(place, Choice())
            choice.add(shape.read(piece))
            # Half a character is no news.
            if choice.text or choice.tokens or choice.finish_reason is not None:
                del held[place]
                part = {"index": place, **shape.part(choice, is_first=place not in begun)}
                begun.add(place)
                yield shape.event([part], None)
    except RefusalError as refusal:
        yield written(refusal.body())
        return
    if has_usage:
        yield shape.event([], exchange.usage())
    yield DONE


def written(body: Mapping[str, Any]) -> bytes:
    """An event that holds JSON, which has no line ends of its own."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
