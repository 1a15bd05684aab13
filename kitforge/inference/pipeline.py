"""Continues texts and answers chats. Gives Hugging Face's shapes."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, final

from torch import nn

from kitforge.data.template import Message, template_of
from kitforge.data.tokenizer import Tokenizer
from kitforge.foundation.config import from_dict
from kitforge.foundation.errors import ConfigError, ModelError
from kitforge.inference.engine import Engine
from kitforge.inference.text_engine import InferenceOptions, TextDelta, TextEngine

TextPrompt = str | Sequence[Message]


@final
class TextGenerationPipeline:
    """`pipeline("text")` gives `[{"generated_text": ...}]`; a list of texts, of any size, gives a list of those.

    A chat is a list of messages `{"role": ..., "content": ...}`; what is generated is then the chat with its reply.
    The engine behind it keeps what it has read, for texts that begin alike, until a weight changes. Threads may share a
    pipeline: their texts are generated together, and each is the one that it is alone.
    """

    def __init__(self, model: nn.Module, tokenizer: Tokenizer, options: InferenceOptions) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self._text_engine = TextEngine(Engine(model, options.engine, stop_ids=tokenizer.eos_ids), tokenizer)
        self._deltas: dict[int, deque[TextDelta]] = {}  # what has come of each request and was not yet fetched
        self._abandoned: deque[int] = deque()  # requests of streams that were given up
        self._weights = _weights_fingerprint(model)

    def __call__(self, texts: TextPrompt | Sequence[TextPrompt], *, num_samples: int = 1, **options: Any) -> list[Any]:
        """The texts, each with `num_samples` continuations; `options` are those of InferenceOptions, for this call."""
        several = _several(texts)
        if several is None:
            result: list[Any] = self([cast(TextPrompt, texts)], num_samples=num_samples, **options)[0]
            return result
        chosen = self._resolve_options(options)
        requests: list[int] = []
        try:
            for index, text in enumerate(several):
                requests.append(self._submit(text, chosen, num_samples, index))
            completions = [self._collect(request, num_samples) for request in requests]
        finally:
            self._drop_requests(requests)
        return [
            [{"generated_text": _continued(text, sample)} for sample in samples]
            for text, samples in zip(several, completions, strict=True)
        ]

    def stream(self, text: TextPrompt, **options: Any) -> Iterator[str]:
        """The continuation piece by piece, each ending with a whole character. Several streams may be read in turn, and
        by several threads, each stream by one."""
        request = self._submit(text, self._resolve_options(options), 1, 0)
        try:
            for delta in self._until_end(request, 1):
                if delta.text:
                    yield delta.text
        finally:
            # A stream that nobody holds is closed by whatever thread collects it, perhaps in the middle of a step, so
            # no lock may be asked for here.
            self._abandoned.append(request)

    def _submit(self, text: TextPrompt, options: InferenceOptions, num_samples: int, index: int) -> int:
        tokens = self._tokens(text)
        with self._text_engine.engine.lock:
            request = self._text_engine.submit(tokens, options, num_samples=num_samples, key=index)
            self._deltas[request] = deque()
        return request

    def _tokens(self, text: TextPrompt) -> list[int]:
        if isinstance(text, str):
            return self.tokenizer.encode_prompt(text)
        return template_of(self.tokenizer).tokens(text, opens_reply=True)

    def _collect(self, request: int, num_samples: int) -> list[str]:
        samples = [""] * num_samples
        for delta in self._until_end(request, num_samples):
            samples[delta.sample] += delta.text
        return samples

    def _until_end(self, request: int, num_samples: int) -> Iterator[TextDelta]:
        """All pieces of a request. What comes of others meanwhile is kept for them."""
        while num_samples:
            delta = self._next(request)
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason == "diverged":
                raise ModelError(
                    "what the model makes of this text is not a number",
                    got="NaN or infinity",
                    expected="finite logits",
                    fix="take a checkpoint from before the training diverged",
                )
            num_samples -= delta.finish_reason is not None
            yield delta

    def _next(self, request: int) -> TextDelta:
        """The next piece of a request. Pieces are handed out before the lock is let go, so none overtakes another; and
        it is let go after every step, so that nobody waits for more than a step of each of the others."""
        while True:
            with self._text_engine.engine.lock:
                self._drop_requests([self._abandoned.popleft() for _ in range(len(self._abandoned))])
                if not self._deltas[request]:
                    for delta in self._text_engine.step():
                        self._deltas[delta.request].append(delta)
                if self._deltas[request]:
                    return self._deltas[request].popleft()

    def _drop_requests(self, requests: list[int]) -> None:
        with self._text_engine.engine.lock:
            for request in requests:
                self._text_engine.cancel(request)
                self._deltas.pop(request, None)

    def _resolve_options(self, options: dict[str, Any]) -> InferenceOptions:
        """The options of a call, and an engine that knows of the weights as they are now."""
        if "engine" in options:
            raise ConfigError(
                "an engine is chosen once for a pipeline",
                got=f"engine={options['engine']!r} for one call",
                fix='pipeline(..., options={"inference.engine.max_num_seqs": 8})',
            )
        with self._text_engine.engine.lock:
            weights = _weights_fingerprint(self.model)
            if weights != self._weights:
                self._weights = weights
                self._text_engine.engine.update_weights(self._text_engine.engine.version + 1)
        return from_dict(InferenceOptions, dataclasses.asdict(self.options) | options, "inference")


def _several(texts: TextPrompt | Sequence[TextPrompt]) -> Sequence[TextPrompt] | None:
    """The texts or chats where there is a list of them; None for a single one."""
    is_one = isinstance(texts, str) or (bool(texts) and isinstance(texts[0], Mapping))
    return None if is_one else cast(Sequence[TextPrompt], texts)


def _continued(text: TextPrompt, sample: str) -> str | list[Message]:
    return text + sample if isinstance(text, str) else [*text, {"role": "assistant", "content": sample}]


def _weights_fingerprint(model: nn.Module) -> int:
    """Changes whenever a parameter is replaced or written to."""
    return hash(tuple((id(each), each._version) for each in model.parameters()))
