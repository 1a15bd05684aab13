"""Pieces of text in the shapes of OpenAI's interface, whole or as events of a stream. Knows no HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from kitforge.inference.sampling import Alternatives
from kitforge.inference.score import PromptLogprob
from kitforge.inference.server.exchange import Exchange, Prompt
from kitforge.inference.server.refusal import RefusalError
from kitforge.inference.server.token_texts import TokenTexts
from kitforge.inference.text import Piece

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of an answer, or of a prompt that an answer begins with."""

    token: int
    logprob: float | None  # None: nothing stands before it
    alternatives: Alternatives  # the most likely tokens in its place
    offset: int  # where it begins in the text of the answer, in characters


@dataclass(slots=True, kw_only=True)
class Choice:
    """An answer, or what was added to it."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[TokenLogprob] = field(default_factory=list)  # only where log-probabilities are asked for
    prompt: list[PromptLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What an answer tells."""

    num_alternatives: int | None = None  # with each token; None: nothing of single tokens
    has_end: bool = False  # the token that ended a text is told with the others
    has_echo: bool = False  # the answer begins with the prompt
    prompt_logprobs: int | None = None  # of how many likely tokens in the place of each of the prompt's


@final
class ChoiceReader:
    """Makes a choice of pieces. A token is told together with its text, so one whose text is cut by a stop string is
    not told at all, whether the pieces are sent one by one or not."""

    def __init__(self, prompt: Prompt, options: ResponseOptions) -> None:
        self._prompt = prompt
        self._options = options
        self._before = len(prompt.text) if options.has_echo else 0
        self._length = 0  # of the text that was generated
        self._held: list[TokenLogprob] = []
        self._has_begun = False

    def read(self, piece: Piece, prompt: list[PromptLogprob] | None) -> Choice:
        """What the next piece adds; `prompt` are the log-probabilities of the prompt's tokens but the first."""
        choice = Choice(text=piece.text, finish_reason=piece.finish_reason)
        if not self._has_begun:
            self._has_begun = True
            choice.prompt = prompt
            if self._options.has_echo:
                choice.text = self._prompt.text + choice.text
                choice.tokens = self._echoed(prompt)
        self._length += len(piece.text)
        if self._options.num_alternatives is not None:
            choice.tokens += self._told(piece)
        return choice

    def _told(self, piece: Piece) -> list[TokenLogprob]:
        found = zip(piece.tokens, piece.logprobs, piece.alternatives, piece.offsets, strict=False)
        self._held += [
            TokenLogprob(token=token, logprob=logprob, alternatives=others, offset=self._before + offset)
            for token, logprob, others, offset in found
        ]
        end = self._before + self._length
        is_last = piece.finish_reason is not None and not piece.is_cut
        place = 0
        while place < len(self._held) and (is_last or self._held[place].offset < end):
            place += 1
        told, self._held = self._held[:place], self._held[place:]
        if is_last and self._options.has_end and len(piece.tokens) > len(piece.offsets):
            told.append(
                TokenLogprob(
                    token=piece.tokens[-1],
                    logprob=piece.logprobs[-1],
                    alternatives=piece.alternatives[-1],
                    offset=end,
                )
            )
        return told

    def _echoed(self, prompt: list[PromptLogprob] | None) -> list[TokenLogprob]:
        if prompt is None or self._options.num_alternatives is None:
            return []
        first, *rest = zip(self._prompt.tokens, self._prompt.offsets, strict=True)
        return [
            TokenLogprob(token=first[0], logprob=None, alternatives=[], offset=first[1]),
            *(
                TokenLogprob(
                    token=token,
                    logprob=each.logprob,
                    alternatives=each.alternatives[: self._options.num_alternatives],
                    offset=offset,
                )
                for (token, offset), each in zip(rest, prompt, strict=True)
            ),
        ]


class ResponseFormat(ABC):
    """How answers are written."""

    def __init__(self, model: str, texts: TokenTexts, options: ResponseOptions) -> None:
        self.options = options
        self._model = model
        self._texts = texts
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @property
    @abstractmethod
    def prefix(self) -> str:
        """How the names of answers begin."""

    @abstractmethod
    def whole(self, choice: Choice, prompt: Prompt) -> dict[str, Any]:
        """A choice that has ended."""

    @abstractmethod
    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""

    @abstractmethod
    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""

    def answer(self, exchange: Exchange, pieces: Sequence[Iterable[Piece]]) -> dict[str, Any]:
        """The whole body, of the pieces of each choice."""
        choices = []
        for place, found in enumerate(pieces):
            prompt = exchange.prompt_of(place)
            reader, choice = ChoiceReader(prompt, self.options), Choice()
            texts: list[str] = []
            for piece in found:
                added = reader.read(piece, exchange.prompt_logprobs_of(place))
                texts.append(added.text)
                choice.tokens += added.tokens
                choice.finish_reason = added.finish_reason
                choice.prompt = choice.prompt or added.prompt
            choice.text = "".join(texts)
            choices.append({"index": place, **self.whole(choice, prompt)})
        return {**self._head(is_stream=False), "choices": choices, "usage": exchange.usage()}

    def event(self, choices: list[dict[str, Any]], usage: Mapping[str, int] | None) -> bytes:
        """One event of a stream."""
        body = {**self._head(is_stream=True), "choices": choices}
        return written({**body, "usage": usage} if usage is not None else body)

    def _head(self, *, is_stream: bool) -> dict[str, Any]:
        kind = self.kind(is_stream=is_stream)
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _prompt_logprobs(self, choice: Choice, prompt: Prompt) -> dict[str, Any]:
        """As vLLM has them: for each token of the prompt, by their numbers, itself and the most likely ones."""
        if self.options.prompt_logprobs is None or choice.prompt is None:
            return {}
        told: list[dict[str, Any] | None] = [None]
        for token, each in zip(prompt.tokens[1:], choice.prompt, strict=True):
            ranked = enumerate(each.alternatives[: self.options.prompt_logprobs], 1)
            found = {token: (each.logprob, each.rank)}
            found |= {other: (logprob, rank) for rank, (other, logprob) in ranked if other != token}
            told.append(
                {
                    str(number): {"logprob": logprob, "rank": rank, "decoded_token": self._texts.text(number)}
                    for number, (logprob, rank) in found.items()
                }
            )
        return {"prompt_logprobs": told}


@final
class CompletionFormat(ResponseFormat):
    """Of /v1/completions."""

    @property
    def prefix(self) -> str:
        """How the names of answers begin."""
        return "cmpl"

    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""
        return "text_completion"

    def whole(self, choice: Choice, prompt: Prompt) -> dict[str, Any]:
        """A choice that has ended."""
        return self.part(choice, is_first=True) | self._prompt_logprobs(choice, prompt)

    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""
        logprobs = None
        if self.options.num_alternatives is not None:
            logprobs = {
                "tokens": [self._texts.text(each.token) for each in choice.tokens],
                "token_logprobs": [each.logprob for each in choice.tokens],
                "top_logprobs": [self._by_text(each) for each in choice.tokens],
                "text_offset": [each.offset for each in choice.tokens],
            }
        return {"text": choice.text, "finish_reason": choice.finish_reason, "logprobs": logprobs}

    def _by_text(self, told: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens and the one that was chosen, which has its text; of others with the same text all but
        one are called by their numbers."""
        if told.logprob is None:
            return None
        own = self._texts.text(told.token)
        found: dict[str, float] = {}
        for token, logprob in told.alternatives:
            text = self._texts.text(token)
            is_taken = text in found or text == own
            found[text if token == told.token or not is_taken else f"token_id:{token}"] = logprob
        return found if own in found else found | {own: told.logprob}


@final
class ChatFormat(ResponseFormat):
    """Of /v1/chat/completions."""

    @property
    def prefix(self) -> str:
        """How the names of answers begin."""
        return "chatcmpl"

    def kind(self, *, is_stream: bool) -> str:
        """The word under `object`."""
        return "chat.completion.chunk" if is_stream else "chat.completion"

    def answer(self, exchange: Exchange, pieces: Sequence[Iterable[Piece]]) -> dict[str, Any]:
        """The whole body, of the pieces of each choice."""
        body = super().answer(exchange, pieces)
        # All choices have the one prompt.
        choice = Choice(prompt=exchange.prompt_logprobs_of(0))
        return body | self._prompt_logprobs(choice, exchange.prompt_of(0))

    def whole(self, choice: Choice, prompt: Prompt) -> dict[str, Any]:
        """A choice that has ended."""
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def part(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """What was added to a choice."""
        delta = ({"role": "assistant"} if is_first else {}) | {"content": choice.text}
        return {"delta": delta, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self.options.num_alternatives is None:
            return None
        content = [
            {
                **self._likely(each.token, each.logprob),
                "top_logprobs": [self._likely(*other) for other in each.alternatives],
            }
            for each in choice.tokens
        ]
        return {"content": content, "refusal": None}

    def _likely(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": self._texts.bytes(token)}


async def collected(form: ResponseFormat, exchange: Exchange) -> dict[str, Any]:
    """The whole answer, once it is there."""
    pieces: list[list[Piece]] = [[] for _ in range(exchange.num_choices)]
    async for place, piece in exchange.pieces():
        pieces[place].append(piece)
    if form.options.num_alternatives is None and form.options.prompt_logprobs is None:
        return form.answer(exchange, pieces)
    # There may be many tokens to be written, for which nobody else should wait.
    return await asyncio.to_thread(form.answer, exchange, pieces)


async def events(form: ResponseFormat, exchange: Exchange, *, has_usage: bool) -> AsyncIterator[bytes]:
    """The answer as server-sent events, each piece as it comes."""
    begun: set[int] = set()
    readers = [ChoiceReader(exchange.prompt_of(place), form.options) for place in range(exchange.num_choices)]
    try:
        async for place, piece in exchange.pieces():
            choice = readers[place].read(piece, exchange.prompt_logprobs_of(place))
            # Half a character is no news.
            if choice.text or choice.tokens or choice.finish_reason is not None:
                part = {"index": place, **form.part(choice, is_first=place not in begun)}
                begun.add(place)
                yield form.event([part], None)
    except RefusalError as refusal:
        yield written(refusal.body())
        return
    if has_usage:
        yield form.event([], exchange.usage())
    yield DONE


def written(body: Mapping[str, Any]) -> bytes:
    """An event that holds JSON, which has no line ends of its own."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
