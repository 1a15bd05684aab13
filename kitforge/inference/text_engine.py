"""Text in and out of an engine: incremental detokenization and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import check
from kitforge.foundation.dtype import LoadDtype
from kitforge.inference.engine import Engine, Output
from kitforge.inference.logprobs import PromptLogprob
from kitforge.inference.options import EngineOptions
from kitforge.inference.sampling import SamplingOptions, TopLogprobs
from kitforge.inference.sequence import FinishReason

# Decoders write it for bytes that are not a whole character.
_REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceOptions(SamplingOptions):
    """Options of text generation."""

    stop: tuple[str, ...] = ()  # strings that end the output, which does not contain them
    dtype: LoadDtype = "auto"  # of the weights of a model loaded for inference; auto: as stored (float16 on CPU: fp32)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        SamplingOptions.__post_init__(self)
        check(all(self.stop), "inference.stop", list(self.stop), "strings that are not empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """The text that a step added to one sample of a request."""

    request: int
    sample: int
    text: str  # whole characters, without stop strings
    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    offsets: list[int]  # of each token in the text, in characters; a stop token has none
    hit_stop_string: bool  # the text ended at a stop string
    finish_reason: FinishReason | None
    prompt_logprobs: list[PromptLogprob] | None  # of all prompt tokens but the first; only in the first delta
    error: Exception | None = None  # of the tokenizer, where finish_reason is "failed"


@final
class Detokenizer:
    """Decodes one sample token by token. The pieces joined are the decoded text up to the first stop string. Text that
    may become a stop string, and incomplete characters, are held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.is_stopped = False
        self.offsets: list[int] = []  # of every token: the index of its first character
        self._length = 0  # of the decoded text
        # Decodes the tokens of an incomplete character, and counts its whole characters.
        self._partial = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_partial = 0
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        # Tokens before `_known` have been decoded. Those from `_context` on are decoded again with the next ones, since
        # the text of a token may depend on the one before it.
        self._context = self._known = 0
        self._held = ""

    def push(self, tokens: Sequence[int], *, is_last: bool = False) -> str:
        """The text that these tokens complete; with `is_last` all text that was held back."""
        for token in tokens:
            was_held = self._known < len(self._tokens)
            self.offsets.append(self._length + (self._character_index(token) if was_held else 0))
            self._tokens.append(token)
            self._decode(is_last=False)
            if self._known == len(self._tokens):
                self._partial.reset()
                self._num_partial = 0
            elif not was_held:
                self._character_index(token)
        if is_last:
            self._decode(is_last=True)
        stop_index = min((index for index in map(self._held.find, self._stop) if index >= 0), default=None)
        size = len(self._held) - (0 if is_last else self._num_open())
        if stop_index is not None:
            self.is_stopped, size = True, stop_index
        text, self._held = self._held[:size], self._held[size:]
        return text

    def _character_index(self, token: int) -> int:
        """The index, among the held-back characters, of the one in which the token begins."""
        content = self._tokenizer.token_bytes(token)
        was_open = bool(self._partial.getstate()[0])
        first = self._partial.decode(content[:1])
        # Its first byte either continues the last character or leaves that one incomplete for good.
        begins = was_open and (len(first) > 1 or (len(first) == 1 and bool(self._partial.getstate()[0])))
        index = self._num_partial + begins
        self._num_partial += len(first) + len(self._partial.decode(content[1:]))
        return index

    def _decode(self, *, is_last: bool) -> None:
        """Decode the tokens after `_known`, unless they end in an incomplete character."""
        before = self._tokenizer.decode(self._tokens[self._context : self._known])
        after = self._tokenizer.decode(self._tokens[self._context :])
        if is_last or not after.endswith(_REPLACEMENT_CHARACTER):
            self._context, self._known = self._known, len(self._tokens)
            text = after[len(before) :]
            self._held += text
            self._length += len(text)

    def _num_open(self) -> int:
        """The length of the longest suffix that may be the beginning of a stop string."""
        for size in range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stop):
                return size
        return 0


@final
class TextEngine:
    """An engine over text. It numbers requests as the engine does, which should have no other user.

    Threads may share it. `step` returns the deltas of all requests; the caller holds `engine.lock` until it has
    distributed them.
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
        """See `Engine.submit`. A text gets the special tokens of the tokenizer; token ids are used as they are."""
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
        """Cancel a request; `step` returns no more deltas of it."""
        with self.engine.lock:
            self.engine.cancel(request)
            for named in [named for named in self._detokenizers if named[0] == request]:
                del self._detokenizers[named]

    @property
    def has_work(self) -> bool:
        """Whether further steps will return deltas."""
        return self.engine.has_work

    def step(self) -> list[TextDelta]:
        """One step of the engine, as text."""
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
        except Exception as raised:  # noqa: BLE001 (an error of the tokenizer fails this sample alone)
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
