"""OpenAI-compatible response bodies and server-sent events, built from text deltas. Independent of HTTP."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kitforge.data.chat.tool_calls import ReplyPart, ReplyReader
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.sampling import TopLogprobs
from kitforge.inference.server.errors import ApiError
from kitforge.inference.server.service import EncodedPrompt, RequestHandle, TokenTexts
from kitforge.inference.text_engine import TextDelta

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a completion or of an echoed prompt."""

    token: int
    logprob: float | None  # None: the first token of a prompt
    top_logprobs: TopLogprobs  # the most likely tokens at its position
    offset: int  # in the text of the completion, in characters


@dataclass(slots=True, kw_only=True)
class Choice:
    """A choice of the response, or a delta of one."""

    text: str = ""  # of a completion
    parts: list[ReplyPart] = field(default_factory=list)  # of a chat
    finish_reason: str | None = None
    tokens: list[TokenLogprob] = field(default_factory=list)  # only where log-probabilities are requested
    prompt_logprobs: list[PromptLogprob] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOptions:
    """What a response contains besides text."""

    num_top_logprobs: int | None = None  # most likely tokens with each token; None: no log-probabilities
    has_stop_token: bool = False  # log-probabilities include the stop token
    has_echo: bool = False  # the text begins with the prompt
    prompt_logprobs: int | None = None  # most likely tokens with each prompt token; None: no prompt log-probabilities
    names_call: bool = False  # the request names the call, so finish_reason does not
    # Every token is reported, also where a stop string cuts its text off.
    is_token_exact: bool = False


class ChoiceReader:
    """Turns text deltas into choice deltas. A token is reported together with its text, so a token whose text a stop
    string cuts off is not reported, streamed or not."""

    def __init__(self, prompt: EncodedPrompt, options: ResponseOptions) -> None:
        self._prompt = prompt
        self._options = options
        self._before = len(prompt.text) if options.has_echo else 0
        self._length = 0  # of the text that was generated
        self._held: list[TokenLogprob] = []
        self._has_begun = False
        marks = prompt.marks
        self._reply = None if marks is None else ReplyReader(marks, prompt.calls, prompt.tools)

    def read(self, delta: TextDelta, prompt_logprobs: list[PromptLogprob] | None) -> Choice:
        """The choice of the next delta; `prompt_logprobs` are those of all prompt tokens but the first."""
        choice = Choice(text=delta.text, finish_reason=delta.finish_reason)
        if not self._has_begun:
            self._has_begun = True
            choice.prompt_logprobs = prompt_logprobs
            if self._options.has_echo:
                choice.text = self._prompt.text + choice.text
                choice.tokens = self._echoed(prompt_logprobs)
        self._length += len(delta.text)
        if self._options.is_token_exact:
            columns = zip(delta.tokens, delta.logprobs, delta.top_logprobs, strict=True)
            choice.tokens = [TokenLogprob(*each, 0) for each in columns]
        elif self._options.num_top_logprobs is not None:
            choice.tokens += self._certain_tokens(delta)
        if self._reply is not None:
            choice.parts = self._reply.push(choice.text, is_last=delta.finish_reason is not None)
            choice.text = ""
            if delta.finish_reason == "stop" and self._reply.num_calls and not self._options.names_call:
                choice.finish_reason = "tool_calls"
        return choice

    def _certain_tokens(self, delta: TextDelta) -> list[TokenLogprob]:
        columns = zip(delta.tokens, delta.logprobs, delta.top_logprobs, delta.offsets, strict=False)
        self._held += [
            TokenLogprob(token, logprob, top, self._before + offset) for token, logprob, top, offset in columns
        ]
        end = self._before + self._length
        is_last = delta.finish_reason is not None and not delta.hit_stop_string
        count = 0
        while count < len(self._held) and (is_last or self._held[count].offset < end):
            count += 1
        tokens, self._held = self._held[:count], self._held[count:]
        if is_last and self._options.has_stop_token and len(delta.tokens) > len(delta.offsets):
            tokens.append(TokenLogprob(delta.tokens[-1], delta.logprobs[-1], delta.top_logprobs[-1], end))
        return tokens

    def _echoed(self, prompt: list[PromptLogprob] | None) -> list[TokenLogprob]:
        if prompt is None or self._options.num_top_logprobs is None:
            return []
        (token, offset), *others = zip(self._prompt.tokens, self._prompt.offsets, strict=True)
        tokens = [TokenLogprob(token, None, [], offset)]
        for (token, offset), each in zip(others, prompt, strict=True):
            top = each.top_logprobs[: self._options.num_top_logprobs]
            tokens.append(TokenLogprob(token, each.logprob, top, offset))
        return tokens


class ResponseFormat(ABC):
    """The JSON format of a route's responses."""

    id_prefix: ClassVar[str]
    object_type: ClassVar[str]  # of a whole response
    chunk_type: ClassVar[str]  # of an event of a stream

    def __init__(self, model: str, texts: TokenTexts, options: ResponseOptions) -> None:
        self.options = options
        self._model = model
        self._texts = texts
        self._id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    @abstractmethod
    def choice_body(self, choice: Choice, prompt: EncodedPrompt) -> dict[str, Any]:
        """A finished choice."""

    @abstractmethod
    def choice_delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        """A delta of a choice."""

    def response_body(self, handle: RequestHandle, deltas: Sequence[Iterable[TextDelta]]) -> dict[str, Any]:
        """The response body, from the deltas of each choice."""
        choices = []
        for index, choice_deltas in enumerate(deltas):
            prompt = handle.prompts[index]
            reader, choice = ChoiceReader(prompt, self.options), Choice()
            texts: list[str] = []
            for delta in choice_deltas:
                added = reader.read(delta, handle.prompt_logprobs_of(index))
                texts.append(added.text)
                choice.parts += added.parts
                choice.tokens += added.tokens
                choice.finish_reason = added.finish_reason
                choice.prompt_logprobs = choice.prompt_logprobs or added.prompt_logprobs
            choice.text = "".join(texts)
            choices.append({"index": index, **self.choice_body(choice, prompt)})
        return {**self._head(self.object_type), "choices": choices, "usage": handle.usage()}

    async def events(self, handle: RequestHandle, *, has_usage: bool, is_continuous: bool) -> AsyncIterator[bytes]:
        """The response as server-sent events, delta by delta; `is_continuous` if each of them has the usage."""
        begun: set[int] = set()
        readers = [ChoiceReader(handle.prompts[index], self.options) for index in range(handle.num_choices)]
        try:
            async for index, delta in handle.deltas():
                choice = readers[index].read(delta, handle.prompt_logprobs_of(index))
                # A delta that completes no character has no text, and one of a mark no part.
                if choice.text or choice.parts or choice.tokens or choice.finish_reason is not None:
                    part = {"index": index, **self.choice_delta(choice, is_first=index not in begun)}
                    begun.add(index)
                    yield self._event([part], handle.usage() if is_continuous else None)
        except ApiError as refusal:
            yield sse_event(refusal.body())
            return
        if has_usage:
            yield self._event([], handle.usage())
        yield DONE

    def _event(self, choices: list[dict[str, Any]], usage: Mapping[str, Any] | None) -> bytes:
        body = {**self._head(self.chunk_type), "choices": choices}
        return sse_event({**body, "usage": usage} if usage is not None else body)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _prompt_logprobs(self, choice: Choice, prompt: EncodedPrompt) -> dict[str, Any]:
        """Prompt log-probabilities in vLLM's format: for each prompt token a dict by token id."""
        if self.options.prompt_logprobs is None or choice.prompt_logprobs is None:
            return {}
        positions: list[dict[str, Any] | None] = [None]
        for token, each in zip(prompt.tokens[1:], choice.prompt_logprobs, strict=True):
            ranked = enumerate(each.top_logprobs[: self.options.prompt_logprobs], 1)
            logprobs = {token: (each.logprob, each.rank)}
            logprobs |= {other: (logprob, rank) for rank, (other, logprob) in ranked if other != token}
            positions.append(
                {
                    str(number): {"logprob": logprob, "rank": rank, "decoded_token": self._texts.text(number)}
                    for number, (logprob, rank) in logprobs.items()
                }
            )
        return {"prompt_logprobs": positions}


class CompletionFormat(ResponseFormat):
    """Responses of /v1/completions."""

    id_prefix, object_type, chunk_type = "cmpl", "text_completion", "text_completion"

    def choice_body(self, choice: Choice, prompt: EncodedPrompt) -> dict[str, Any]:
        return self.choice_delta(choice, is_first=True) | self._prompt_logprobs(choice, prompt)

    def choice_delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        logprobs = None
        if self.options.num_top_logprobs is not None:
            logprobs = {
                "tokens": [self._texts.text(each.token) for each in choice.tokens],
                "token_logprobs": [each.logprob for each in choice.tokens],
                "top_logprobs": [self._by_text(each) for each in choice.tokens],
                "text_offset": [each.offset for each in choice.tokens],
            }
        return {"text": choice.text, "finish_reason": choice.finish_reason, "logprobs": logprobs}

    def _by_text(self, token_logprob: TokenLogprob) -> dict[str, float] | None:
        """The most likely tokens and the sampled one, by text. Where several tokens have one text, the sampled one has
        it, else the most likely one; the others are named `token_id:N`."""
        if token_logprob.logprob is None:
            return None
        own = self._texts.text(token_logprob.token)
        logprobs: dict[str, float] = {}
        for token, logprob in token_logprob.top_logprobs:
            text = self._texts.text(token)
            is_taken = text in logprobs or text == own
            logprobs[text if token == token_logprob.token or not is_taken else f"token_id:{token}"] = logprob
        return logprobs if own in logprobs else logprobs | {own: token_logprob.logprob}


class ChatFormat(ResponseFormat):
    """Responses of /v1/chat/completions."""

    id_prefix, object_type, chunk_type = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def response_body(self, handle: RequestHandle, deltas: Sequence[Iterable[TextDelta]]) -> dict[str, Any]:
        body = super().response_body(handle, deltas)
        # All choices share the one prompt.
        choice = Choice(prompt_logprobs=handle.prompt_logprobs_of(0))
        return body | self._prompt_logprobs(choice, handle.prompts[0])

    def choice_body(self, choice: Choice, prompt: EncodedPrompt) -> dict[str, Any]:
        said = _said(choice.parts)
        for call in said.get("tool_calls", ()):
            del call["index"]
        message = {"role": "assistant", "content": None if said else "", "refusal": None} | said
        return {"message": message, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def choice_delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        said = _said(choice.parts)
        delta = ({"role": "assistant", "content": None if said else ""} if is_first else {}) | said
        return {"delta": delta, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if self.options.num_top_logprobs is None:
            return None
        content = [
            {
                **self._likely(each.token, each.logprob),
                "top_logprobs": [self._likely(*other) for other in each.top_logprobs],
            }
            for each in choice.tokens
        ]
        return {"content": content, "refusal": None}

    def _likely(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": logprob, "bytes": self._texts.bytes(token)}


class TokenFormat(ResponseFormat):
    """Responses of /inference/v1/generate, as in vLLM: tokens, without their text."""

    id_prefix, object_type, chunk_type = "gen", "generate", "generate.chunk"

    def choice_body(self, choice: Choice, prompt: EncodedPrompt) -> dict[str, Any]:
        return self.choice_delta(choice, is_first=True) | self._prompt_logprobs(choice, prompt)

    def choice_delta(self, choice: Choice, *, is_first: bool) -> dict[str, Any]:
        content = [
            {
                **_numbered(each.token, each.logprob),
                "top_logprobs": [_numbered(*other) for other in each.top_logprobs[: self.options.num_top_logprobs]],
            }
            for each in choice.tokens
        ]
        tokens = [each.token for each in choice.tokens]
        return {"token_ids": tokens, "finish_reason": choice.finish_reason, "logprobs": {"content": content}}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"request_id": self._id, **super()._head(kind)}


def _numbered(token: int, logprob: float | None) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": logprob}


def _said(parts: Iterable[ReplyPart]) -> dict[str, Any]:
    """The parts of a reply under OpenAI's names; thoughts under both that clients know."""
    texts: dict[tuple[str, int], list[str]] = {}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if part.kind == "call":
            function = {"name": part.text, "arguments": ""}
            calls[part.call] = {"index": part.call, "id": part.id, "type": "function", "function": function}
        else:
            texts.setdefault((part.kind, part.call * (part.kind == "arguments")), []).append(part.text)
    said: dict[str, Any] = {}
    for (kind, index), spelled in texts.items():
        if kind == "arguments":
            call = calls.setdefault(index, {"index": index, "function": {}})
            call["function"]["arguments"] = "".join(spelled)
        else:
            said |= {name: "".join(spelled) for name in ([kind] if kind == "content" else [kind, "reasoning_content"])}
    return said | ({"tool_calls": list(calls.values())} if calls else {})


def sse_event(body: Mapping[str, Any]) -> bytes:
    """A server-sent event with a JSON body on one line."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
