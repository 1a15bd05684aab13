"""Words for an engine that knows numbers only: pieces of text as they become certain, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.inference.engine import Engine, Output
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions, TopLogprobs
from kitforge.inference.sequence import FinishReason

# How a decoder shows bytes that are not a character, or not yet.
_REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions(SamplingOptions):
    """How texts are continued, and by what engine."""

    stop: tuple[str, ...] = ()  # a text ends before the first of these
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        check(all(self.stop), "inference.stop", list(self.stop), "strings that are not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What a step added to one sample of a request."""

    request: int
    sample: int
    text: str  # whole characters, none of a stop string
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    offsets: list[int]  # where in the text each token begins, in characters; a last token without one ends the text
    hit_stop_string: bool  # the text ends before a stop string
    finish_reason: FinishReason | None
    prompt_logprobs: list[PromptLogprob] | None  # of the prompt's tokens but the first, where they are asked for: once
    error: Exception | None = None  # of the tokenizer, where the reason is "failed"


@final
class Detokenizer:
    """The text of one sample, token by token. All pieces together are the decoded text, cut before the first stop
    string. What could still become a stop string, or is half a character, is held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self.offsets: list[int] = []  # of every token: the character that it begins, or is a part of
        self._length = 0  # of the text so far, without what is held back as part of a character
        # The bytes of the tokens that are held back, and how many characters these come to but for the last.
        self._partial = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_partial = 0
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        # Tokens before `_known` have been decoded; those from `_context` on are decoded again with the next ones,
        # since a token may be written differently after another than alone.
        self._context = self._known = 0
        self._held = ""

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The text that has become certain with these tokens; all of it with the last ones."""
        for token in tokens:
            was_held = self._known < len(self._tokens)
            self.offsets.append(self._length + (self._character_index(token) if was_held else 0))
            self._tokens.append(token)
            self._hold(self._decoded(is_last=False))
            if self._known == len(self._tokens):
                self._partial.reset()
                self._num_partial = 0
            elif not was_held:
                self._character_index(token)
        if is_last:
            self._hold(self._decoded(is_last=True))
        stop_index = min((index for index in map(self._held.find, self._stop) if index >= 0), default=None)
        if stop_index is not None:
            self.is_stopped = True
            return self._release(stop_index)
        return self._release(len(self._held) - (0 if is_last else self._num_open()))

    def _character_index(self, token: int) -> int:
        """Of the characters that are held back, the one in which the token begins."""
        content = self._tokenizer.token_bytes(token)
        was_open = bool(self._partial.getstate()[0])
        first = self._partial.decode(content[:1])
        # Either its first byte goes on with the last character, or that one will never be whole.
        begins = was_open and (len(first) > 1 or (len(first) == 1 and bool(self._partial.getstate()[0])))
        index = self._num_partial + begins
        self._num_partial += len(first) + len(self._partial.decode(content[1:]))
        return index

    def _hold(self, text: str) -> None:
        self._held += text
        self._length += len(text)

    def _decoded(self, *, is_last: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._context : self._known])
        after = self._tokenizer.decode(self._tokens[self._context :])
        if after.endswith(_REPLACEMENT_CHARACTER) and not is_last:
            return ""
        self._context, self._known = self._known, len(self._tokens)
        return after[len(before) :]

    def _num_open(self) -> int:
        """How many of the last characters may be the beginning of a stop string."""
        for size in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stop):
                return size
        return 0

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        return text


@final
class TextEngine:
    """An engine that takes and gives text. Requests are numbered by the engine, which should have no other user.

    Threads may share it. Whoever steps is given the pieces of all, and holds `engine.lock` until each has its own.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._detokenizers: dict[tuple[int, int], Detokenizer] = {}

    def submit(
        self,
        prompt: str | Sequence[int],
        options: InferenceOptions,
        *,
        priority: int = 0,
        num_samples: int = 1,
        key: str | int | None = None,
        num_top_logprobs: int = 0,
    ) -> int:
        """See `Engine.submit`; a text begins as the tokenizer says, tokens are taken as they are."""
        tokens = self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        with self.engine.lock:
            request = self.engine.submit(
                tokens,
                options,
                priority=priority,
                num_samples=num_samples,
                key=key,
                num_top_logprobs=num_top_logprobs,
            )
            for sample in range(num_samples):
                self._detokenizers[request, sample] = Detokenizer(self.tokenizer, options.stop)
        return request

    def cancel(self, request: int) -> None:
        """Stop what is left of a request; nothing more is heard of it."""
        with self.engine.lock:
            self.engine.cancel(request)
            for named in [named for named in self._detokenizers if named[0] == request]:
                del self._detokenizers[named]

    @property
    def has_work(self) -> bool:
        """Whether a step would give something, now or later."""
        return self.engine.has_work

    def step(self) -> list[TextDelta]:
        """One step of the engine, in words."""
        with self.engine.lock:
            return [
                self._delta(output)
                for output in self.engine.step()
                if (output.request, output.sample) in self._detokenizers
            ]

    def _delta(self, output: Output) -> TextDelta:
        detokenizer, reason = self._detokenizers[output.request, output.sample], output.finish_reason
        kept = output.tokens[:-1] if reason == "stop" else output.tokens
        text, error = "", None
        try:
            text = detokenizer.push(kept, is_last=reason is not None)
        except Exception as raised:  # noqa: BLE001 (whatever a tokenizer raises concerns this text and no other)
            error = raised
        ended: FinishReason | None = "failed" if error is not None else "stop" if detokenizer.is_stopped else None
        if ended is not None and reason != "stop":
            self.engine.cancel(output.request, output.sample)
        reason = ended or reason
        if reason is not None:
            del self._detokenizers[output.request, output.sample]
        return TextDelta(
            request=output.request,
            sample=output.sample,
            text=text,
            tokens=output.tokens,
            logprobs=output.logprobs,
            top_logprobs=output.top_logprobs,
            offsets=detokenizer.offsets[len(detokenizer.offsets) - len(kept) :],
            hit_stop_string=detokenizer.is_stopped,
            finish_reason=reason,
            prompt_logprobs=output.prompt_logprobs,
            error=error,
        )
